"""Results files and what is made from them: JSON and text written whole or not at all, tables, figures."""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ssm_trn.files import replacing, write_whole
from ssm_trn.version import VERSION

FORMAT_VERSION = 1
RESULTS_FILE = "results.json"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def read_results(path: str | Path, of: str) -> dict[str, Any]:
    """What a results.json holds, which must have something under the name `of`.

    Raises:
        ValueError: if this release cannot read it.
    """
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a results file: make it anew") from error
    if not isinstance(results, dict):
        raise ValueError(f"{path} is not a results file: make it anew")
    if results.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {results.get('format_version')}, this release reads {FORMAT_VERSION}"
        )
    if not results.get(of):
        raise ValueError(f"{path} has no {of}: make it anew")
    return results


def remake_report(
    description: str | None, of: str, write: Callable[[dict[str, Any], Path], None], arguments: Sequence[str] | None
) -> None:
    """The command line of a report's module: makes the report anew beside the results.json that is named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a results.json")
    path = parser.parse_args(arguments).results
    write(read_results(path, of), path.parent)


def write_results(path: Path, results: dict[str, Any]) -> None:
    write_whole(path, json.dumps(results, indent=2) + "\n")


def machine_facts() -> dict[str, Any]:
    """What figures of this machine depend on."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ssm_trn": VERSION,
    }


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def into_markers(text: str, content: str) -> str:
    """`text` with `content` between the lines that mark the place of generated results."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"there is no place for the table: put the lines '{BEGIN}' and '{END}' where it belongs")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def new_figure(x_label: str, y_label: str, height: float = 4.0):
    """A figure and its axes."""
    from matplotlib.figure import Figure  # without pyplot: no display and no global state

    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure, axes, path: Path) -> None:
    from matplotlib import rc_context

    axes.legend(frameon=False)
    # Without a date, and with ids that are not drawn at random, so that the same results give the same file.
    with replacing(path) as unfinished, rc_context({"svg.hashsalt": path.name}):
        figure.savefig(unfinished, format=path.suffix[1:], metadata={"Date": None})
