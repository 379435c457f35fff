"""The rows of a comparison's table: each model in each size, over its seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssm_trn.evaluation.statistics import Mean, mean_of

# Tasks whose answer stands in the prompt.
RECALL_TASKS = ("ssm_needle", "ssm_key_value", "swde", "fda", "squad_completion")


@dataclass(frozen=True)
class Row:
    """A model in one size. `runs` are its entries in the results, `baseline` those of the baseline in that size."""

    name: str
    runs: Sequence[dict[str, Any]]
    baseline: Sequence[dict[str, Any]]

    @property
    def first(self) -> dict[str, Any]:
        """What does not depend on the seed is read here."""
        return self.runs[0]

    @property
    def is_baseline(self) -> bool:
        return self.name == self.baseline[0]["name"]

    @property
    def bits_per_byte(self) -> Mean:
        """Over seeds; of one seed the value with its interval over the text."""
        return _over_seeds([run["bits_per_byte"] for run in self.runs])

    @property
    def bits_per_byte_difference(self) -> Mean:
        """To the baseline, paired by seed, as a seed orders the data of both alike, and by text."""
        return _over_seeds([run["difference"] for run in self.runs])

    def score(self, task: str) -> Mean:
        return mean_of([_score(run, task) for run in self.runs], [1.96 * _error(run, task) for run in self.runs])

    def score_difference(self, task: str) -> Mean:
        """To the baseline, paired by seed; the items count as if each model had had others."""
        pairs = list(zip(self.runs, self.baseline, strict=True))
        differences = [_score(ours, task) - _score(theirs, task) for ours, theirs in pairs]
        return mean_of(differences, [1.96 * math.hypot(*(_error(run, task) for run in pair)) for pair in pairs])


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The rows in the order of the results."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for run in results["models"]:
        grouped.setdefault(run["name"], []).append(run)
    names = list(grouped)
    count = len({run["model"] for run in results["models"]})
    rows = []
    for place, (name, runs) in enumerate(grouped.items()):
        in_size = names[place // count * count :][:count]
        baseline = next(of for of in in_size if grouped[of][0]["model"] == results["study"]["baseline"])
        rows.append(Row(name, runs, grouped[baseline]))
    return rows


def _over_seeds(estimates: Sequence[dict[str, float]]) -> Mean:
    if len(estimates) == 1:
        return Mean(**estimates[0], n=1)
    half_widths = [(estimate["high"] - estimate["low"]) / 2 for estimate in estimates]
    return mean_of([estimate["value"] for estimate in estimates], half_widths)


def _score(run: dict[str, Any], task: str) -> float:
    return run["tasks"][task]["value"]


def _error(run: dict[str, Any], task: str) -> float:
    """The standard error over items; 0 where the metric has none."""
    return run["tasks"][task]["stderr"] or 0.0


def is_recall(task: str) -> bool:
    return task.startswith(RECALL_TASKS)


def label(name: str) -> str:
    return name.replace("_", " ")
