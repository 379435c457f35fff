"""A folder in the making: it appears complete or not at all, and one that was interrupted is gone on with.

It is written beside its place, as .NAME.partial-..., and renamed when it is whole. Once it holds a progress file, it
outlives a failure or a kill; the next call with the same settings finds it. Without one, it is removed.
"""

import fcntl
import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssm_trn.files import write_whole

PROGRESS_FILE = "progress.json"


@contextmanager
def replacing(folder: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """A folder to write to, new or begun with the same settings, that takes the place of `folder` at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.partial-"
    partial, lock = _take_abandoned(folder.parent, prefix, settings) or _make(folder.parent, prefix)
    try:
        yield partial
        (partial / PROGRESS_FILE).unlink(missing_ok=True)
        if folder.exists():
            replaced = folder.rename(folder.parent / f"{prefix}{uuid.uuid4().hex}")
            partial.rename(folder)
            shutil.rmtree(replaced)
        else:
            partial.rename(folder)
    except BaseException as error:
        if not (partial / PROGRESS_FILE).exists():
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno and not error.filename:  # as of a disk that is full
            raise OSError(error.errno, error.strerror, str(folder)) from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def save_progress(partial: Path, settings: dict[str, Any], progress: dict[str, Any]) -> None:
    """Notes how far the files are, which must be on disk by now."""
    write_whole(partial / PROGRESS_FILE, json.dumps({"settings": settings, **progress}))


def saved_progress(partial: Path) -> dict[str, Any] | None:
    """What was noted last; None in a new folder, or where the note is damaged."""
    try:
        noted = json.loads((partial / PROGRESS_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return noted if isinstance(noted, dict) and {"settings", "count", "splits"} <= noted.keys() else None


def _make(parent: Path, prefix: str) -> tuple[Path, int | None]:
    partial = parent / f"{prefix}{uuid.uuid4().hex}"
    partial.mkdir()
    return partial, _lock(partial)


def _take_abandoned(parent: Path, prefix: str, settings: dict[str, Any]) -> tuple[Path, int | None] | None:
    """What an interrupted run with these settings left, if any; what others left is removed.

    A lock ends with its process, so the folders of live runs are known by theirs.
    """
    taken = None
    for path in sorted(parent.glob(f"{glob.escape(prefix)}*")):
        if (lock := _lock(path)) is None:
            continue
        progress = saved_progress(path)
        if taken is None and progress is not None and progress["settings"] == settings:
            taken = path, lock
        else:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    return taken


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
