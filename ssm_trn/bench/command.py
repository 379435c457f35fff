"""`ssm-trn bench ops` and `ssm-trn bench step`: results.json, report.md and a plot in one folder."""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ssm_trn.bench import report
from ssm_trn.bench.measure import Comparison, measure
from ssm_trn.bench.ops import OPS
from ssm_trn.bench.step import STEPS
from ssm_trn.ops.contexts import one_thread
from ssm_trn.results import FORMAT_VERSION, RESULTS_FILE, machine_facts, read_results, write_results

COMPARISONS = {"ops": OPS, "step": STEPS}
PEERS = ("transformers", "mambapy", "mlstm_kernels")


def ops(rows: str | None = None, rounds: int | None = None, output: str = "runs/bench") -> dict[str, Any]:
    """Forward and backward passes of ops beside other implementations, on one CPU thread.

    Rows that the folder holds already and that are not measured now stay. The extra 'dev' brings the other libraries
    but mlstm_kernels, whose licence keeps it out: `pip install --no-deps mlstm_kernels` lets its row run.

    Args:
        rows: Names of comparisons, separated by commas; all by default.
        rounds: How often each is timed; by default as often as its duration allows.
        output: Folder of results.json, report.md and ratios.svg.

    Returns:
        What results.json holds.

    Raises:
        ValueError: A name is unknown, or the folder holds results of another machine or of other versions.
    """
    return _bench("ops", rows, rounds, output)


def step(rows: str | None = None, rounds: int | None = None, output: str = "runs/bench") -> dict[str, Any]:
    """Training steps and decoding of 10-million-parameter models beside those of transformers, on one CPU thread.

    Rows that the folder holds already and that are not measured now stay. Arguments, result and errors are those of
    `ops`.

    Args:
        rows: Names of comparisons, separated by commas; all by default.
        rounds: How often each is timed; by default as often as its duration allows.
        output: Folder of results.json, report.md and ratios.svg.

    Returns:
        What results.json holds.
    """
    return _bench("step", rows, rounds, output)


def _bench(group: str, rows: str | None, rounds: int | None, output: str) -> dict[str, Any]:
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    chosen = _chosen(COMPARISONS[group], rows)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers would look for kernels there
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # and says that it found none
    path = Path(output) / RESULTS_FILE
    results = _earlier(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, comparison in chosen.items():
        print(f"{name} ...", flush=True)
        results["comparisons"][name] = measure(comparison, rounds)
        order = [name for comparisons in COMPARISONS.values() for name in comparisons]
        results["comparisons"] = dict(sorted(results["comparisons"].items(), key=lambda item: order.index(item[0])))
        write_results(path, results)
    report.write_report(results, path.parent)
    print(f"\n{report.table(results)}\n\n{path.parent / 'report.md'} has the details and a plot.")
    return results


def _chosen(comparisons: Mapping[str, Comparison], rows: str | None) -> dict[str, Comparison]:
    names = list(comparisons) if rows is None else [name.strip() for name in rows.split(",")]
    for name in names:
        if name not in comparisons:
            raise ValueError(f"there is no row '{name}': choose of {', '.join(comparisons)}")
    return {name: comparisons[name] for name in names}


def _earlier(path: Path) -> dict[str, Any]:
    """The results at `path`, to add to, or empty ones."""
    with one_thread():
        head = {"machine": machine_facts(), "peers": {name: _version(name) for name in PEERS}}
    if not path.exists():
        return {"format_version": FORMAT_VERSION, "command": "make bench", **head, "comparisons": {}}
    earlier = read_results(path, "comparisons")
    for name, value in head.items():
        if earlier.get(name) != value:
            raise ValueError(f"{path} was measured with another {name}: remove it, or choose another --output")
    return earlier


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
