"""Files that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name in the same folder to write to: it takes the place of `path` when the block ends well, else it vanishes.

    A process that is killed may leave the file under that name, .NAME.unfinished; the next one overwrites it. Of a link
    the file that it leads to is replaced. What is neither file nor folder, such as /dev/null, is written to itself.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path = path.resolve()
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


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


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
