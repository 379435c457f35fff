"""Token files: a folder with a tokenizer and, for each split, the ids of its text in one flat array on disk.

    tokenizer.model          the sentencepiece model that made the ids
    {split}.bin              the ids of all documents, one after the other, each [BOS, tokens..., EOS]: little-endian
                             uint16, or uint32 from a vocabulary of 65,536 on
    {split}.documents.npy    int64 [documents + 1]: where each document starts, and where the last one ends
    meta.json                format_version 1, the settings of `ssm-trn prepare`, counts for each split (documents,
                             tokens, UTF-8 bytes of the text), size and SHA-256 of each file above

The splits are "train" and "validation". Ids are mapped into memory, not read.
"""

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, Tokenizer
from ssm_trn.files import replacing

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
TOKENIZER_FILE = "tokenizer.model"
META_FILE = "meta.json"
_AGAIN = "run `ssm-trn prepare` again, with --overwrite"


@dataclass(frozen=True, eq=False)
class TokenFile:
    """One split of a prepared folder; `len` is its number of tokens.

    Attributes:
        tokens: uint16 or uint32 [tokens], a read-only memory map.
        offsets: int64 [documents + 1], where each document starts in `tokens`, and where the last one ends.
        tokenizer: the tokenizer of the folder.
        text_bytes: UTF-8 bytes of the text that the tokens stand for.
        sha256: digest of `tokens`, as it was when they were written.
    """

    folder: Path
    split: str
    tokens: np.ndarray
    offsets: np.ndarray
    tokenizer: Tokenizer
    text_bytes: int
    sha256: str

    @classmethod
    def open(cls, folder: str | Path, split: str) -> "TokenFile":
        """Opens the split "train" or "validation" of a folder.

        Raises:
            FileNotFoundError: the folder is not a prepared one, or a file of it is missing.
            ValueError: unknown split; a file was cut short; the tokens are of another tokenizer, or of another version.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        if split not in meta["splits"]:
            raise ValueError(f"{folder} has no split '{split}': choose one of {', '.join(meta['splits'])}")
        tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
        if tokenizer.hash != meta["tokenizer"]["hash"]:
            raise ValueError(
                f"the tokens in {folder} were made by another tokenizer than its {TOKENIZER_FILE}: {_AGAIN}"
            )
        for name in (tokens_name(split), documents_name(split)):
            _check_size(folder / name, meta["files"][name]["bytes"])
        return cls(
            folder,
            split,
            tokens=np.memmap(folder / tokens_name(split), token_dtype(tokenizer.vocab_size), mode="r"),
            offsets=_offsets(folder / documents_name(split), meta["splits"][split]["tokens"]),
            tokenizer=tokenizer,
            text_bytes=meta["splits"][split]["bytes"],
            sha256=meta["files"][tokens_name(split)]["sha256"],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple:
        return TokenFile.open, (self.folder, self.split)  # a pickled memory map would carry all of its data

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """The ids [BOS, tokens..., EOS] of a document: a view, not a copy."""
        if not 0 <= index < self.documents:
            raise ValueError(f"there is no document {index}: the {self.split} split has {self.documents}")
        return self.ids(slice(self.offsets[index], self.offsets[index + 1]))

    def ids(self, positions: np.ndarray | slice) -> np.ndarray:
        """The ids at positions. Raises ValueError if one is outside the vocabulary: the file holds something else."""
        ids = self.tokens[positions]
        if ids.size and ids.max() >= self.tokenizer.vocab_size:
            path = self.folder / tokens_name(self.split)
            raise ValueError(f"{path} holds ids that its tokenizer does not have: {_AGAIN}")
        return ids


def held_out_documents(folder: str | Path) -> Iterator[str]:
    """The texts of the held-out documents of a prepared folder, character for character as they were given."""
    validation = TokenFile.open(folder, "validation")
    return (validation.tokenizer.decode(validation.document(index)) for index in range(validation.documents))


def read_meta(folder: str | Path) -> dict[str, Any]:
    """What meta.json of a prepared folder holds: `settings`, `tokenizer`, `splits`, `files`, `versions`.

    Raises FileNotFoundError if the folder is not a prepared one, ValueError if it is of another format version.
    """
    path = Path(folder) / META_FILE
    if not path.is_file():
        raise FileNotFoundError(f"there is no prepared data in {folder}: make it with `ssm-trn prepare`")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format_version"]
        if version == FORMAT_VERSION and not _is_whole(meta):
            raise ValueError("it lacks a part")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the meta file of prepared data: {_AGAIN}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {version}, this ssm_trn reads {FORMAT_VERSION}: {_AGAIN}")
    return meta


class TokenWriter:
    """Writes one split, document after document; what it keeps in memory is 8 bytes for each.

    Given the counts that an earlier writer's `save` returned, it goes on from there.

    Attributes:
        counts: documents, tokens (BOS and EOS included) and UTF-8 bytes of text so far.
    """

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, saved: dict[str, int] | None = None) -> None:
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._documents_path = folder / documents_name(split)
        self._offsets = array("q", [0])
        self.counts = dict(saved or {"documents": 0, "tokens": 0, "bytes": 0})
        path = folder / tokens_name(split)
        self._file = path.open("r+b" if saved else "wb")
        if saved:
            size = saved["tokens"] * self._dtype.itemsize
            if path.stat().st_size < size:
                raise ValueError(f"{path} was cut short: remove {folder} to begin anew")
            self._file.truncate(size)  # what was written after `save`
            self._file.seek(size)
            self._offsets = array("q", np.load(self._documents_path)[: saved["documents"] + 1].tobytes())

    def write(self, ids: Sequence[int] | np.ndarray, text_bytes: int) -> None:
        """Appends a document, given its ids without BOS and EOS, and the UTF-8 bytes of its text."""
        document = np.empty(len(ids) + 2, dtype=self._dtype)
        document[0], document[1:-1], document[-1] = BOS_ID, ids, EOS_ID
        self._file.write(document.data)
        self.counts["documents"] += 1
        self.counts["tokens"] += len(document)
        self.counts["bytes"] += text_bytes
        self._offsets.append(self.counts["tokens"])

    def save(self) -> dict[str, int]:
        """Brings all that was written to the disk and returns the counts."""
        self._file.flush()
        os.fsync(self._file.fileno())
        with replacing(self._documents_path) as unfinished, unfinished.open("wb") as file:
            np.save(file, np.array(self._offsets, dtype=np.int64))
        return dict(self.counts)

    def close(self) -> dict[str, int]:
        """Completes the files and returns the counts, for meta.json."""
        counts = self.save()
        self._file.close()
        return counts


def write_meta(
    folder: Path, tokenizer: Tokenizer, splits: dict[str, dict[str, int]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Writes meta.json, the last file of a prepared folder, and returns what it holds.

    It has no date in it, so that the same settings make the same folder.

    Args:
        folder: holds all other files already.
        tokenizer: the tokenizer that made them.
        splits: the counts of each split.
        settings: the source of the text and what else decided the content of the files.
    """
    paths = (folder / name for name in sorted(file_names() - {META_FILE}))
    files = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in paths}
    meta = {
        "format_version": FORMAT_VERSION,
        "settings": settings,
        "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "splits": splits,
        "files": files,
        "versions": {
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "sentencepiece": sentencepiece.__version__,
        },
    }
    (folder / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta


def file_names() -> set[str]:
    """The files of a prepared folder."""
    return {TOKENIZER_FILE, META_FILE, *map(tokens_name, SPLITS), *map(documents_name, SPLITS)}


def tokens_name(split: str) -> str:
    """The file with the ids of a split."""
    return f"{split}.bin"


def documents_name(split: str) -> str:
    """The file with the offsets of the documents of a split."""
    return f"{split}.documents.npy"


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of the ids on disk."""
    return np.dtype("<u2" if vocab_size < 2**16 else "<u4")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(meta: dict[str, Any]) -> bool:
    files = {TOKENIZER_FILE, *map(tokens_name, SPLITS), *map(documents_name, SPLITS)}
    return (
        {"hash", "vocab_size"} <= meta["tokenizer"].keys()
        and {"name"} <= meta["settings"]["source"].keys()
        and all({"documents", "tokens", "bytes"} <= meta["splits"][split].keys() for split in SPLITS)
        and all({"bytes", "sha256"} <= meta["files"][name].keys() for name in files)
    )


def _offsets(path: Path, tokens: int) -> np.ndarray:
    try:
        offsets = np.load(path)
        fits = offsets.dtype == np.int64 and offsets.ndim == 1 and offsets[0] == 0 and offsets[-1] == tokens
    except (ValueError, EOFError, IndexError) as error:
        raise ValueError(f"{path} is damaged: {_AGAIN}") from error
    if not fits or (np.diff(offsets) < 0).any():
        raise ValueError(f"{path} does not fit the tokens beside it: {_AGAIN}")
    return offsets


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_AGAIN}")
    size = path.stat().st_size
    if size != expected:
        raise ValueError(f"{path} has {size} bytes where it should have {expected}: copy the folder again, or {_AGAIN}")
