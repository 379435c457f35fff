"""Files that appear whole or not at all."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name in the same folder to write to: it takes the place of `path` when the block ends well, else it vanishes.

    The content is on the disk before it gets its name, so that not even a machine that fails leaves half a file. A
    process that is killed may leave the file under that name, .NAME.unfinished; the next one overwrites it. Of a link
    the file that it leads to is replaced. What is neither file nor folder, such as /dev/null, is written to itself.

    Raises OSError with `path` in it if it cannot be written, also where a library tells that in another way.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path = path.resolve()
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        flush_to_disk(unfinished)
        os.replace(unfinished, path)
        with suppress(OSError):  # some network file systems cannot
            flush_to_disk(path.parent)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if (number := _unnamed_error(error)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def flush_to_disk(path: str | Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: str | Path) -> None:
    """Removes what a killed process left of the files that it was writing into a folder."""
    for path in Path(folder).glob(".*.unfinished"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def _unnamed_error(error: BaseException) -> int | None:
    """The number of the operating system's error that an error without a file's name stands for, if it does."""
    if told := re.search(r"\(os error (\d+)\)", str(error)):  # as Rust writes it
        return int(told[1])
    cause = error.__context__ if type(error) is RuntimeError else error  # PyTorch closes a file that it could not write
    return cause.errno if isinstance(cause, OSError) and not cause.filename else None


@contextmanager
def filling(folder: str | Path) -> Iterator[Path]:
    """A new folder beside `folder` to write to: what is in it moves there when the block ends well, else it vanishes.

    A process that is killed may leave it under the name .NAME.unfinished; the next one begins it anew.
    """
    folder = Path(folder).resolve()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        folder.mkdir(exist_ok=True)
        for path in unfinished.iterdir():
            shutil.move(path, folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_text(path: Path) -> str:
    """The text of a file with the ends of its lines as they are; a ValueError if it is not UTF-8."""
    return as_text(path.read_bytes(), str(path))


def as_text(content: bytes, source: str) -> str:
    """UTF-8 as text; a ValueError that names the source if it is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text, at byte {error.start}: convert it first") from error


def read_piece(folder: Path, value: str | dict[str, Any], owner: str) -> dict[str, Any]:
    """A part of a configuration: itself, or what the YAML file of that name in `folder` holds.

    Raises FileNotFoundError if there is none; `owner` is who names it.
    """
    if not isinstance(value, str):
        return value
    if not (folder / value).is_file():
        raise FileNotFoundError(f"{owner} names {value}, but there is no file {folder / value}")
    return read_yaml(folder / value)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; a ValueError that names the file if it is none."""
    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
