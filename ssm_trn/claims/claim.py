"""What a folder of papers/ shows, and how its README tells it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssm_trn.claims.experiment import Experiment
from ssm_trn.claims.rows import Results, read_rows, write_rows
from ssm_trn.files import read_text, write_whole
from ssm_trn.results import into_markers, save_figure

FIGURE_FILE = "figure.svg"


@dataclass(frozen=True)
class Shape:
    """Something that a paper reports, and whether results show it: `holds` says so; None where they lack it."""

    text: str
    holds: Callable[[Results], bool | None]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        folder: papers/NAME, with README.md.
        title: in a line.
        experiments: by scale, "cpu" and "trn1", what is run.
        keys: columns of results.csv that tell settings apart, but the seed.
        value: the column that is compared between runs.
        table: Markdown of the results.
        figure: figure and axes of them, as `ssm_trn.results.new_figure` makes; None: there is nothing to draw.
        shapes: what the paper reports.
        floor: least tolerance of `value`, for what chance alone moves.
    """

    folder: Path
    title: str
    experiments: Mapping[str, Experiment]
    keys: Sequence[str]
    value: str
    table: Callable[[Results], str]
    figure: Callable[[Results], Any] | None = None
    shapes: Sequence[Shape] = field(default_factory=tuple)
    floor: float = 0.02

    @property
    def name(self) -> str:
        return self.folder.name

    def results_file(self, scale: str) -> str:
        return "results.csv" if scale == "cpu" else f"results-{scale}.csv"

    def committed(self, scale: str) -> Results:
        """The rows of this folder that are compared."""
        rows = read_rows(self.folder / self.results_file(scale))
        return Results(self.experiments[scale].compared(rows))

    def write(self, rows: Sequence[dict[str, str]], scale: str, place: Path) -> None:
        """Rows, figure and, in the claim's own folder, README's part that is made of them.

        README tells of the scale "cpu"; other scales have a report beside it.
        """
        write_rows(place / self.results_file(scale), rows)
        results = Results(self.experiments[scale].compared(rows))
        if not results.rows:
            return
        suffix = "" if scale == "cpu" else f"-{scale}"
        if self.figure is not None and (drawn := self.figure(results)) is not None:
            figure, axes = drawn
            save_figure(figure, axes, place / FIGURE_FILE.replace(".", f"{suffix}."))
        content = self.report(results, rows)
        if place == self.folder and scale == "cpu":
            write_whole(place / "README.md", into_markers(read_text(place / "README.md"), content))
        else:
            write_whole(place / f"report{suffix}.md", f"# {self.title}\n\n{content}\n")

    def report(self, results: Results, rows: Sequence[dict[str, str]]) -> str:
        """The part of README that is made of results.csv."""
        return "\n\n".join(filter(None, [self.table(results), self._shapes(results), _cost(rows)]))

    def _shapes(self, results: Results) -> str:
        marks = {True: "**shown**", False: "**not shown**", None: "not yet run"}
        return "\n".join(f"* {marks[shape.holds(results)]}: {shape.text}" for shape in self.shapes)


def _cost(rows: Sequence[dict[str, str]]) -> str:
    """The work behind the rows, those of settings that were only tried among them."""
    seconds = {row["job"]: float(row["cpu_seconds"]) for row in rows if row.get("cpu_seconds")}
    if not seconds:
        return ""
    return f"{len(seconds)} jobs, {sum(seconds.values()) / 60:.0f} minutes of one core in all."
