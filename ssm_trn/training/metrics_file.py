"""metrics.csv: every number that a run logged, kept over interruptions."""

import csv
import io
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from ssm_trn.files import flush_to_disk, replacing

METRICS_FILE = "metrics.csv"


class MetricsFile(Logger):
    """Appends to metrics.csv in `folder` one row a log call; a new metric adds a column, empty in the rows before.

    Lightning's CSVLogger deletes the file that it finds; here a resumed run goes on behind the rows of the steps that
    its checkpoint knows (`restart_after`). `latest` holds the last value of each metric.
    """

    def __init__(self, folder: str):
        super().__init__()
        self.path = os.path.join(folder, METRICS_FILE)
        self.latest: dict[str, float] = {}
        self._columns: list[str] = []

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return os.path.dirname(self.path)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.latest.update(metrics)
        row = {"step": step, **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._rewrite(self._columns + new, self._rows())
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns).writerow(row)
        try:
            with open(self.path, "a", newline="") as file:
                file.write(line.getvalue())  # a row in one piece
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error

    @rank_zero_only
    def save(self) -> None:
        """Waits until all rows are on the disk."""
        if os.path.exists(self.path):
            flush_to_disk(self.path)

    def finalize(self, status: str) -> None:
        """All rows are in the file; Lightning's own version would save, and hide the error that ended the run."""

    @rank_zero_only
    def restart_after(self, step: int) -> None:
        """Drops the rows of later steps, which the run is about to do again; 0 begins a new file."""
        rows = [row for row in self._rows() if int(row["step"]) <= step]
        self._rewrite(list(rows[0]) if rows else [], rows)

    def _rows(self) -> list[dict[str, str]]:
        if not os.path.exists(self.path):
            return []
        with open(self.path, newline="") as file:
            whole, newline, _ = file.read().rpartition("\n")  # what follows it was cut short, by a full disk for one
        rows = list(csv.DictReader(io.StringIO(whole + newline, newline="")))
        if not all((row.get("step") or "").isdecimal() for row in rows):
            raise ValueError(f"{self.path} is not the metrics of a run: move it away")
        return rows

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        self._columns = columns
        os.makedirs(self.save_dir, exist_ok=True)
        with replacing(self.path) as unfinished, open(unfinished, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
