"""A small corpus, its tokenizer, and one model of each family."""

import json
import random
from pathlib import Path

import lm_eval.tasks
import pytest

from ssm_trn import LanguageModel
from ssm_trn.data.prepare import prepare
from ssm_trn.data.tokenizer import Tokenizer
from tests.evaluation.models import LAYERS, tiny_model
from tests.evaluation.samples import BLIMP, COPA, SAMPLES

OFFICIAL = Path(lm_eval.tasks.__file__).parent
TEXT = """the a of and to in that we for our is it on as with by this be are nation year people congress must new work
world peace time law state free great country power every public service trade war land bank treaty river school health
energy budget farm labour market citizen freedom duty justice naïve café größe 中国 мир 🙂"""


def sentence(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(TEXT.split(), k=words)).capitalize() + generator.choice([".", ".", "!", "?"])


def document(generator: random.Random) -> str:
    lengths = [[generator.randint(6, 14) for _ in range(generator.randint(3, 8))] for _ in range(4)]
    return "\n\n".join(" ".join(sentence(generator, words) for words in paragraph) for paragraph in lengths)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    """A prepared data folder: 40 documents, of which 2 in 10 are held out."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    lines = [json.dumps({"text": document(generator)}) for _ in range(40)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    prepare(str(folder / "prepared"), source=str(folder / "corpus.jsonl"), vocab_size=480, holdout_every=5)
    return str(folder / "prepared")


@pytest.fixture(scope="session")
def tokenizer(data) -> Tokenizer:
    return Tokenizer.load(f"{data}/tokenizer.model")


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory) -> str:
    """A folder of benchmark files with three items for each task."""
    folder = tmp_path_factory.mktemp("benchmarks")
    blimp = {f"blimp/{path.stem}": BLIMP for path in OFFICIAL.glob("blimp/[!_]*.yaml")}
    languages = [path.stem.removeprefix("default_") for path in OFFICIAL.glob("xcopa/default_*.yaml")]
    xcopa = {f"xcopa/{language}.{split}": COPA for language in languages for split in ("validation", "test")}
    for name, item in (SAMPLES | blimp | xcopa).items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        items = item if isinstance(item, list) else [item] * 3
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(folder)


@pytest.fixture(scope="session", params=LAYERS)
def model(request, tokenizer) -> LanguageModel:
    return tiny_model(request.param, tokenizer.vocab_size)
