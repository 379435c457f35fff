"""A benchmark's results as a table and a plot, made from results.json alone.

python -m ssm_trn.bench.report runs/bench/results.json     report.md and ratios.svg beside it
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssm_trn.files import write_whole
from ssm_trn.results import markdown_table, new_figure, remake_report, save_figure

HEADER = ("measured", "T", "against", "target", "ratio (rounds)", "met", "ssm_trn", "peer", "parameters")


def write_report(results: dict[str, Any], folder: Path) -> None:
    """report.md and ratios.svg in `folder`."""
    plot_ratios(results, folder / "ratios.svg")
    parts = ["# Speed and memory beside other implementations", table(results), notes(results)]
    write_whole(folder / "report.md", "\n\n".join([*parts, "![Measured and target ratios](ratios.svg)"]) + "\n")


def table(results: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    return markdown_table(HEADER, [_cells(row) for row in all_rows(results)])


def all_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for rows in results["comparisons"].values() for row in rows]


def met(row: dict[str, Any]) -> bool:
    return "ratio" in row and row["ratio"] >= row["target_ratio"]


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["title"], f"{row['length']:,}", row["against"], f"{row['target_ratio']:g}x"]
    if "ratio" not in row:
        return [*cells, "not measured", "no", row["not_measured"], "", ""]
    sides = row["ours"], row["peer"]
    spread = f" ({row['lowest_ratio']:.2f} to {row['highest_ratio']:.2f})" if row["quantity"] == "seconds" else ""
    amounts = [
        f"{side['median'] * 1e3:,.1f} ms" if row["quantity"] == "seconds" else f"{side['median'] / 2**20:,.0f} MiB"
        for side in sides
    ]
    parameters = "" if sides[0]["parameters"] is None else " / ".join(f"{side['parameters']:,}" for side in sides)
    return [*cells, f"{row['ratio']:.2f}x{spread}", "yes" if met(row) else "no", *amounts, parameters]


def notes(results: dict[str, Any]) -> str:
    machine = results["machine"]
    peers = ", ".join(f"{name} {version}" for name, version in results["peers"].items())
    return (
        "Ratio: what the other takes over what ssm_trn takes; in brackets the lowest and highest of the rounds. Times "
        "are medians of CPU time on one thread, taken in turns in one process, batch 1, float32: of an op forward and "
        "backward with the gradients of all inputs, of a training step with loss and AdamW, of decoding for 32 tokens "
        "behind T. Memory: by how much a fresh process grows at its peak, in one forward and backward pass. The memory "
        "allocator is tuned for both (ssm_trn/runtime.py). Where both compute the same thing, their outputs and "
        "gradients (of a model the logits) were compared before. The recurrent loop indexes each step, so that its "
        "backward pass is quadratic in T; Llama decodes with the default cache of transformers, which is copied at "
        "each token. The models beside Llama have as many parameters as it, to within 1 %: with feed-forward, a SwiGLU "
        "layer follows each of 6 mixers, as `layers: [mamba, ...]` has it; the papers' blocks are 12 mixers alone.\n\n"
        f"{machine['processor']}, Python {machine['python']}, PyTorch {machine['torch']}, "
        f"ssm_trn {machine['ssm_trn']}, {peers}. Made by `{results['command']}`."
    )


def plot_ratios(results: dict[str, Any], path: Path) -> None:
    """For each row the measured ratio as a bar that starts at 1, the span of its rounds, and the target ratio."""
    rows = [row for row in reversed(all_rows(results)) if "ratio" in row]
    figure, axes = new_figure("times as fast, or as small, as the other", "", height=1.2 + 0.32 * len(rows))
    for is_met, colour, label in ((True, "tab:blue", "target met"), (False, "tab:orange", "target not met")):
        bars = [(place, row["ratio"] - 1) for place, row in enumerate(rows) if met(row) is is_met]
        if bars:
            axes.barh(*zip(*bars, strict=True), left=1, height=0.6, color=colour, label=label)
    places = range(len(rows))
    lowest, highest = ([row[end] for row in rows] for end in ("lowest_ratio", "highest_ratio"))
    axes.hlines(places, lowest, highest, color="grey", linewidth=1, label="span of the rounds")
    axes.scatter([row["target_ratio"] for row in rows], places, marker="|", s=120, color="black", label="target")
    labels = [f"{row['title']}, T {row['length']:,}\nagainst {row['against']}" for row in rows]
    axes.set_yticks(places, labels, fontsize=6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.axvline(1, color="black", linewidth=0.8)
    save_figure(figure, axes, path)


def main(arguments: Sequence[str] | None = None) -> None:
    remake_report(__doc__, "comparisons", write_report, arguments)


if __name__ == "__main__":
    sys.exit(main())
