"""Our tokenizer as transformers loads it: the same ids for every text."""

import json
import random

import pytest

from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from ssm_trn.interop.tokenizer import TOKENIZER_FILES, export_tokenizer
from tests.data.conftest import ODDITIES, make_documents

PROBES = ["", " ", "  two  ", "\n", "\r\n\r\n", "a\u2581b", "\u2581", "▁▁\n▁", "\x00", "\ufeff", *ODDITIES]
PROBES += ["</s><0x41><unk>", "<s>", " <s> hi </s>", "<pad><pad>", "<0x0A>", "in <s>side</s> text"]
ALPHABETS = ["ab", "ab ", "aab \n", "abc▁ ", "the people \t\n", "é😀ﬁＡ abc", "0123 ab", "<s>/ pad0x"]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    repeated = "aaaaaaaaaaa ababababa aabaabaab aba    abab\t\t  aaa  " * 50  # pieces that overlap in many ways
    return Tokenizer.train([*make_documents(100, seed=1), repeated], 640)


@pytest.fixture(scope="module")
def theirs(transformers, ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    export_tokenizer(ours, folder)
    assert {path.name for path in folder.iterdir()} == set(TOKENIZER_FILES)
    return transformers.AutoTokenizer.from_pretrained(folder)


def texts() -> list[str]:
    generator = random.Random(0)
    valid = [*range(0xD800), *range(0xE000, 0x110000)]
    words = " ".join(make_documents(20, seed=3)).split(" ")
    drawn = [
        "".join(generator.choice(alphabet) for _ in range(generator.randint(1, 60)))
        for alphabet in ALPHABETS
        for _ in range(100)
    ]
    drawn += ["".join(chr(generator.choice(valid)) for _ in range(40)) for _ in range(100)]
    ends = [" ", "  ", "\n", "", " \n "]
    drawn += ["".join(generator.choice(words) + generator.choice(ends) for _ in range(30)) for _ in range(100)]
    return [*PROBES, *make_documents(20, seed=2), *drawn]


def test_the_ids_are_the_same(ours, theirs):
    all_texts = texts()
    assert len(all_texts) > 1000
    expected = ours.encode_batch(all_texts)
    assert theirs(all_texts, add_special_tokens=False)["input_ids"] == expected
    assert theirs(all_texts)["input_ids"] == [[BOS_ID, *ids] for ids in expected]
    for text, ids in zip(all_texts, expected, strict=True):
        assert theirs.decode(ids) == text
        assert theirs.decode([BOS_ID, *ids, EOS_ID, PAD_ID], skip_special_tokens=True) == text


def test_texts_join(ours, theirs):
    assert theirs.encode(" people", add_special_tokens=False) == ours.encode(" people")
    assert theirs("the", " people")["input_ids"] == [BOS_ID, *ours.encode("the people")]


def test_special_tokens_and_padding(ours, theirs):
    named = theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id
    assert named == (UNK_ID, BOS_ID, EOS_ID, PAD_ID)
    assert len(theirs) == theirs.vocab_size == ours.vocab_size
    batch = theirs(["the people", "the"], padding=True)
    lengths = [1 + len(ours.encode(text)) for text in ("the people", "the")]
    assert batch["attention_mask"] == [[1] * lengths[0], [0] * (lengths[0] - lengths[1]) + [1] * lengths[1]]
    assert batch["input_ids"][1][: lengths[0] - lengths[1]] == [PAD_ID] * (lengths[0] - lengths[1])


def test_transformers_saves_and_loads_it_again(transformers, ours, theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = [[BOS_ID, *ids] for ids in ours.encode_batch(PROBES)]
    assert again(PROBES)["input_ids"] == expected


def test_the_files_are_the_same_every_time(ours, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        export_tokenizer(ours, tmp_path / name)
    for name in TOKENIZER_FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    ids = json.loads((tmp_path / "one" / "generation_config.json").read_text())
    assert ids == {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
