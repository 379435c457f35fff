"""A small corpus with all that is hard in text, prepared once for all tests of the data side."""

import json
import random
from pathlib import Path

import pytest

from ssm_trn.data.prepare import prepare

WORDS = (
    "the",
    "union",
    "of",
    "states",
    "and",
    "people",
    "shall",
    "pay",
    "debts,",
    "power",
    "1789",
    "Ünïcode",
    "日本語",
)
ODDITIES = ("\t", "  ", "\n\n", "\r\n", "\u2581", "\u2028", "\x00", "🙂", "e\u0301", "<s>", "ﬁ", "\ufeff")
VOCAB_SIZE = 384


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Random documents of 30 to 60 words."""
    generator = random.Random(seed)

    def token() -> str:
        return generator.choice(WORDS) + (generator.choice(ODDITIES) if generator.random() < 0.1 else " ")

    return ["".join(token() for _ in range(generator.randint(30, 60))) for _ in range(count)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(47)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, documents) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "documents.jsonl", documents)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, corpus) -> Path:
    """A prepared folder: read only."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    prepare(str(folder), str(corpus), vocab_size=VOCAB_SIZE)
    return folder
