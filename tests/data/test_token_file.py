import json
import pickle
import shutil

import numpy as np
import pytest

from ssm_trn.data import token_file
from ssm_trn.data.prepare import is_held_out, prepare
from ssm_trn.data.token_file import TokenFile, held_out_documents, read_meta, token_dtype
from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, Tokenizer
from tests.data.conftest import VOCAB_SIZE


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(prepared, tmp_path / "copy")


def expected(documents, split):
    return [text for i, text in enumerate(documents) if is_held_out(i, len(documents), 20) == (split == "validation")]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_holds_the_documents(prepared, documents, split):
    tokens = TokenFile.open(prepared, split)
    texts = expected(documents, split)
    assert tokens.documents == len(texts)
    assert tokens.text_bytes == sum(len(text.encode()) for text in texts)
    assert len(tokens) == sum(len(tokens.document(index)) for index in range(len(texts)))
    for index, text in enumerate(texts):
        ids = tokens.document(index)
        assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
        assert list(ids[1:-1]) == tokens.tokenizer.encode(text)
    assert tokens.tokenizer.piece_bytes[tokens.tokens].sum() == tokens.text_bytes


def test_held_out_documents(prepared, documents):
    assert list(held_out_documents(prepared)) == expected(documents, "validation")


def test_document_index(prepared):
    validation = TokenFile.open(prepared, "validation")
    for index in (-1, validation.documents):
        with pytest.raises(ValueError, match=f"no document {index}"):
            validation.document(index)


def test_maps_the_file_and_pickles_its_name_only(prepared):
    tokens = TokenFile.open(prepared, "train")
    assert isinstance(tokens.tokens, np.memmap)
    assert not tokens.tokens.flags.writeable
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).tokens, tokens.tokens)


def test_dtype():
    assert token_dtype(2**16 - 1) == np.dtype("<u2")
    assert token_dtype(2**16) == np.dtype("<u4")


def test_wide_ids(corpus, prepared, tmp_path, monkeypatch):
    narrow = TokenFile.open(prepared, "train")
    monkeypatch.setattr(token_file, "token_dtype", lambda vocab_size: np.dtype("<u4"))
    prepare(str(tmp_path / "wide"), str(corpus), vocab_size=VOCAB_SIZE)
    wide = TokenFile.open(tmp_path / "wide", "train")
    assert wide.tokens.dtype == np.uint32
    assert np.array_equal(wide.tokens, narrow.tokens)


def test_not_prepared(tmp_path):
    with pytest.raises(FileNotFoundError, match="no prepared data in .*: make it with `ssm-trn prepare`"):
        TokenFile.open(tmp_path, "train")


def test_unknown_split(prepared):
    with pytest.raises(ValueError, match="no split 'test': choose one of train, validation"):
        TokenFile.open(prepared, "test")


@pytest.mark.parametrize("name", ["train.bin", "train.documents.npy"])
def test_truncated_file(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-2])
    with pytest.raises(ValueError, match=f"{name} has {len(content) - 2} bytes where it should have {len(content)}"):
        TokenFile.open(folder, "train")
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        TokenFile.open(folder, "train")


def test_another_tokenizer(folder, documents):
    Tokenizer.train(documents, 300).save(folder / "tokenizer.model")
    with pytest.raises(ValueError, match="made by another tokenizer"):
        TokenFile.open(folder, "train")


def test_another_format_version(folder):
    meta = read_meta(folder)
    assert meta["format_version"] == 1
    (folder / "meta.json").write_text(json.dumps(meta | {"format_version": 2}))
    with pytest.raises(ValueError, match="format version 2, this ssm_trn reads 1"):
        TokenFile.open(folder, "train")


def test_bytes_of_something_else(folder):
    size = (folder / "train.bin").stat().st_size
    (folder / "train.bin").write_bytes(b"\xff" * size)
    file = TokenFile.open(folder, "train")
    for read in (lambda: file.document(0), lambda: file.ids(slice(None)), lambda: file.ids(np.array([[0, 1]]))):
        with pytest.raises(ValueError, match="train.bin holds ids that its tokenizer does not have"):
            read()


@pytest.mark.parametrize("content", [b"\x80\x04", b"\x00"])
def test_offsets_of_something_else(folder, content):
    path = folder / "train.documents.npy"
    path.write_bytes((content * path.stat().st_size)[: path.stat().st_size])
    with pytest.raises(ValueError, match="train.documents.npy is damaged"):
        TokenFile.open(folder, "train")


def test_offsets_of_another_file(folder):
    path = folder / "train.documents.npy"
    np.save(path, np.load(path)[::-1])
    with pytest.raises(ValueError, match="does not fit the tokens beside it"):
        TokenFile.open(folder, "train")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 1, "splits": []}']
)
def test_meta_file_of_something_else(folder, content):
    (folder / "meta.json").write_text(content)
    with pytest.raises(ValueError, match="not the meta file of prepared data"):
        read_meta(folder)
