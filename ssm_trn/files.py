"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name in the same folder to write to: it takes the place of `path` when the block ends well, else it vanishes.

    A process that is killed may leave the file under that name, .NAME.unfinished; the next one overwrites it.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
