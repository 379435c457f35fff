"""How far a long pass over data is: a bar for who looks on, a line a minute for a log."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS = 60.0  # between lines


class PassProgress:
    """Counts what was done.

    Args:
        description: what is being done, such as "Tokenizing".
        unit: what is counted, such as "tokens".
        total: how much there is to do; None: unknown.
    """

    def __init__(self, description: str, unit: str, total: int | None = None) -> None:
        self._description, self._unit, self._total, self._done, self._shown = description, unit, total, 0, 0
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._next_line = time.monotonic() + _SECONDS

    def __enter__(self) -> "PassProgress":
        if self._bar is not None:
            self._task = self._bar.add_task(self._description, total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, amount: int) -> None:
        """So much more was done."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=f"{self._description} {self._state()}")
        elif time.monotonic() >= self._next_line:
            now = time.monotonic()
            rate = (self._done - self._shown) / (now - self._next_line + _SECONDS)
            print(f"{self._description}: {self._state()}, {rate:,.0f} a second", file=sys.stderr, flush=True)
            self._shown, self._next_line = self._done, now + _SECONDS

    def _state(self) -> str:
        of = f" of {self._total:,}" if self._total else ""
        return f"{self._done:,}{of} {self._unit}"
