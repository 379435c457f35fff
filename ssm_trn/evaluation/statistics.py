"""Means over seeds and how sure of them one can be: Student's t over the seeds, which are few."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """The mean of n values with the ends of its 95 % interval; None of a single value, which tells no spread."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def half_width(self) -> float:
        """Of the interval; 0 where there is none."""
        return 0.0 if self.high is None else self.high - self.value

    @property
    def differs_from_zero(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def mean_of(values: Sequence[float], half_widths: Sequence[float] | None = None) -> Mean:
    """The mean of values that were drawn alike, such as one for each seed.

    Args:
        values: one for each seed.
        half_widths: of the 95 % interval that each value has of its own, because only so much text or so many items
            were looked at. As these were the same for all seeds, more seeds do not make that smaller: it is added, as
            independent errors are, to what comes of the seeds.
    """
    value = statistics.fmean(values)
    if len(values) < 2:
        return Mean(value, None, None, len(values))
    from scipy.stats import t

    seeds = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    half = math.sqrt(seeds**2 + statistics.fmean(width**2 for width in half_widths or [0.0]))
    return Mean(value, value - half, value + half, len(values))
