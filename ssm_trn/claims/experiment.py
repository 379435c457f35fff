"""What a claim runs: numbered jobs that give rows."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, str]  # of results.csv: columns and what stands in them


@dataclass(frozen=True)
class Job:
    """A piece of work that is done whole or begun again.

    Attributes:
        name: of its folder, and in the column `job` of its rows.
        seed: of weights and data.
        settings: fingerprint of all that decides its rows, so that rows of other settings are not taken for its own.
        tries: whether it helps to choose a setting, such as a learning rate, that later jobs then have.
    """

    name: str
    seed: int
    settings: str
    tries: bool = False


def fingerprint(settings: Any) -> str:
    """Eight hexadecimal digits of plain values."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


class Experiment(Protocol):
    """Jobs and what they give. Must be picklable, as jobs run in processes of their own."""

    def jobs(self) -> Sequence[Job]:
        """All jobs, those that try settings first."""
        ...

    def run(self, job: Job, folder: Path, rows: Sequence[Row]) -> list[Row]:
        """Does a job, or goes on with it, in a folder that is its own; job, seed and settings are added to its rows.

        Args:
            job: one of `jobs()`.
            folder: for what it keeps; what an interrupted call has left there is used.
            rows: of the jobs that are done; where `job` does not try settings itself, all that do are among them.
        """
        ...

    def compared(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that table and figure are made of: without those of settings that were tried and not chosen."""
        ...

    def narrowed(self, rows: Sequence[Row], seeds: Sequence[int] | None, reduced: bool) -> "Experiment":
        """The same with other seeds (None: its own), or reduced to what takes minutes and one seed.

        Settings that `rows`, the committed ones, have chosen are not tried again.
        """
        ...
