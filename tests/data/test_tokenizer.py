import io
import random
import re

import pytest
import sentencepiece

from ssm_trn.data import tokenizer as tokenizer_module
from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from tests.data.conftest import ODDITIES, VOCAB_SIZE, make_documents


@pytest.fixture(scope="module")
def tokenizer(documents) -> Tokenizer:
    return Tokenizer.train(documents, VOCAB_SIZE)


def unicode_texts(count: int) -> list[str]:
    """Random texts of characters from all planes, without surrogates."""
    generator = random.Random(0)
    valid = [*range(0xD800), *range(0xE000, 0x110000)]
    return ["".join(chr(generator.choice(valid)) for _ in range(40)) for _ in range(count)]


PROBES = ["", " ", "  two  ", "\n", "\r\n\r\n", "a\u2581b", "\u2581", "▁▁\n▁", "</s><0x41><unk>", *ODDITIES]


@pytest.mark.parametrize("text", [*PROBES, *make_documents(20, seed=1), *unicode_texts(20)])
def test_round_trip_is_lossless_and_accounts_for_each_byte(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.piece_bytes[ids].sum() == len(text.encode())
    assert not {UNK_ID, BOS_ID, EOS_ID, PAD_ID} & set(ids)


def test_batch_equals_single_texts(tokenizer, documents):
    texts = [*PROBES, *documents]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_words_encode_as_whole_texts_do(tokenizer, documents, tmp_path):
    """Cutting at the ends of lines and words must not change the ids: no piece crosses them."""
    tokenizer.save(tmp_path / "tokenizer.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in (
        document.replace("\u2581", "") for document in [*documents, " a  b ", "a   \n  b\t c", *unicode_texts(5)]
    ):
        assert tokenizer.encode(text) == processor.encode(text)
    assert not any(re.search("[\r\n]|[^\u2581]\u2581", piece) for piece in tokenizer.pieces)


def test_pieces_of_several_words_are_kept(documents):
    """As a tokenizer of another project may have them."""
    model = io.BytesIO()
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3, "add_dummy_prefix": False, "split_by_whitespace": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["of the people"] * 99),
        model_writer=model,
        model_type="bpe",
        vocab_size=280,
        minloglevel=2,
        **options,
        **ids,
    )
    tokenizer = Tokenizer(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ("of the people", "the people of the people"):
        assert tokenizer.encode(text) == processor.encode(text)
    assert len(tokenizer.encode("of the people")) < 3


def test_no_more_words_are_remembered_than_the_limit(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_REMEMBERED", 30)
    words = [f"word{number}" for number in range(100)]
    expected = [tokenizer.encode(word) for word in words]
    assert [tokenizer.encode(word) for word in words] == expected
    assert len(tokenizer._ids_of) <= 32


def test_texts_join(tokenizer):
    """lm-eval scores a continuation that starts with its space: there must be no space added of itself."""
    assert tokenizer.encode("the people") == tokenizer.encode("the") + tokenizer.encode(" people")


def test_learns_words(tokenizer):
    assert len(tokenizer.encode(" people")) == 1
    assert len(tokenizer.encode("1789")) == 4  # digits stay apart


def test_decode_of_half_a_character_and_of_special_ids(tokenizer):
    ids = tokenizer.encode("\u03c0")  # not in the corpus: two bytes
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode([BOS_ID, *ids, EOS_ID, PAD_ID]) == "\u03c0"


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE], [5, -100]])
def test_decode_refuses_ids_outside_the_vocabulary(tokenizer, ids):
    with pytest.raises(ValueError, match="vocabulary"):
        tokenizer.decode(ids)


def test_hash_is_that_of_the_pieces(tokenizer, documents):
    assert Tokenizer.train(documents, VOCAB_SIZE).hash == tokenizer.hash
    assert Tokenizer.train(documents, VOCAB_SIZE - 1).hash != tokenizer.hash


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.model")
    loaded = Tokenizer.load(tmp_path / "tokenizer.model")
    assert loaded.hash == tokenizer.hash
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.encode("the union") == tokenizer.encode("the union")


@pytest.mark.parametrize(("wrong", "word"), [(100_000, "most"), (270, "least")])
def test_wrong_vocab_size_names_the_possible_one(documents, wrong, word):
    with pytest.raises(ValueError, match=f"vocab_size {wrong} .* choose at {word} [0-9]+") as raised:
        Tokenizer.train(documents, wrong)
    possible = int(re.search(rf"at {word} (\d+)", str(raised.value))[1])
    assert Tokenizer.train(documents, possible).vocab_size == possible


def test_trains_on_a_tiny_text():
    tokenizer = Tokenizer.train(["hello hello world"], 272)
    assert tokenizer.decode(tokenizer.encode("hello, wörld\n")) == "hello, wörld\n"


def test_learns_from_lines_longer_than_sentencepiece_takes():
    tokenizer = Tokenizer.train(["abracadabra " * 10_000], 275)
    assert len(tokenizer.encode("abracadabra ")) < 6


@pytest.mark.parametrize("texts", [[], [""], ["\n\r\n"]])
def test_no_text(texts):
    with pytest.raises(ValueError, match="no text"):
        Tokenizer.train(texts, 300)


def test_surrogates_are_refused(tokenizer):
    for call in (lambda text: tokenizer.encode(text), lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(ValueError, match="surrogate pair at character 2"):
            call("ab\ud800")
    with pytest.raises(ValueError, match="surrogate"):
        Tokenizer.train(["ab\ud800"], 300)


def test_load_of_what_is_no_tokenizer_of_ours(tmp_path, documents):
    path = tmp_path / "tokenizer.model"
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        Tokenizer.load(path)
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        Tokenizer.load(path)
    foreign = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents), model_writer=foreign, vocab_size=60, minloglevel=2
    )
    path.write_bytes(foreign.getvalue())
    with pytest.raises(ValueError, match="special ids"):
        Tokenizer.load(path)
