"""Rows of results: kept in results.csv, selected, averaged over seeds, and held against those of another run."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssm_trn.claims.experiment import Row
from ssm_trn.evaluation.statistics import Mean, mean_of
from ssm_trn.files import read_text, write_whole


def read_rows(path: Path) -> list[Row]:
    """The rows of a results.csv; none where there is no such file."""
    if not path.exists():
        return []
    rows = list(csv.DictReader(io.StringIO(read_text(path))))
    if any(None in row or None in row.values() or not {"job", "seed", "settings"} <= row.keys() for row in rows):
        raise ValueError(f"{path} is damaged: restore it with git, or remove it and run again")
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """All rows, in the order of their first columns, so that the same results are the same file."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())


class Results:
    """Rows that can be asked for: `results.of(model="mamba2", test="length 64").mean("accuracy")`."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = list(rows)

    def of(self, **columns: str) -> "Results":
        """Those rows in which these columns have these values."""
        return Results(row for row in self.rows if all(row.get(name) == value for name, value in columns.items()))

    def distinct(self, column: str) -> list[str]:
        """The different values of a column, in the order of the rows."""
        return list(dict.fromkeys(row[column] for row in self.rows))

    def by_seed(self, column: str) -> dict[str, float]:
        """The numbers of a column by seed; rows in which it is empty are left out."""
        return {row["seed"]: float(row[column]) for row in self.rows if row.get(column)}

    def mean(self, column: str) -> Mean | None:
        """Over the seeds; None where there is no number."""
        values = list(self.by_seed(column).values())
        return mean_of(values) if values else None

    def value(self, column: str) -> float:
        """The mean over the seeds; NaN where there is none, which no comparison holds for."""
        mean = self.mean(column)
        return float("nan") if mean is None else mean.value


@dataclass(frozen=True)
class Deviation:
    """A figure of a new run beside the committed ones of the same setting."""

    setting: str
    value: float
    committed: float
    tolerance: float

    @property
    def is_within(self) -> bool:
        return abs(self.value - self.committed) <= self.tolerance


def tolerance(mean: Mean, values: Sequence[float], floor: float) -> float | None:
    """How far one more seed may lie from the mean of `values`, by 95 %; None of a single one, which tells no spread.

    The prediction interval of normal draws, t(0.975, n - 1) s sqrt(1 + 1/n), and at least `floor`.
    """
    if mean.high is None:
        return None
    return max(floor, (mean.high - mean.value) * (len(values) + 1) ** 0.5)  # that of the mean has s / sqrt(n)


def deviations(new: Results, committed: Results, keys: Sequence[str], column: str, floor: float) -> list[Deviation]:
    """Each figure of `new` beside the committed ones that agree with it in the columns `keys`, where there are two."""
    found = []
    for row in new.rows:
        setting = {key: row[key] for key in keys}
        values = list(committed.of(**setting).by_seed(column).values())
        if not row.get(column) or len(values) < 2:
            continue
        mean = mean_of(values)
        allowed = tolerance(mean, values, floor)
        found.append(Deviation(", ".join(setting.values()), float(row[column]), mean.value, allowed or floor))
    return found
