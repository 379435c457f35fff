"""`python -m ssm_nki.cost [--csv FILE] [--into FILE]`: the modelled cost of every kernel on trn1 and trn2, as a table.

Nothing in it is measured, but for the column that `--measured FILE` adds: ssm_nki.cycles is the model. The floors are
what no kernel can beat there: moving its inputs and results between HBM and SBUF once, and doing its products at
TensorE's peak.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ["SSM_NKI_SIMULATE"] = "1"  # before kernels are imported: costs come from the simulator, also beside the SDK

from ssm_nki import cases, cycles  # noqa: E402
from ssm_nki.simulator import Machine  # noqa: E402

BEGIN, END = "<!-- cost: begin -->", "<!-- cost: end -->"
KEY = ("kernel", "direction", "shape", "target")  # what tells rows apart
RESOURCES = ("tensor", "vector", "scalar", "gpsimd", "dma", "psum_port", "sbuf_port")


def measure(case: cases.Case, generation: str) -> dict[str, Any]:
    """The row of `case` on one generation; times are in milliseconds."""
    kernel, arguments = case.build()
    machine = Machine(generation, compute=False)
    results = machine.run(kernel, *arguments)
    cost = cycles.cost(machine.trace)
    target = cost.target
    peak = target.peak_bfloat16 if case.dtype == "bfloat16" else target.peak_float32
    floor_dma = _nbytes((arguments, results)) / (cycles.DMA_ENGINES * target.dma_rate) / 1e6
    floor_flops = case.flops / peak / 1e6
    time = cost.microseconds / 1e3
    return {
        "kernel": case.kernel,
        "direction": case.direction,
        "shape": case.shape,
        "target": target.name,
        "ms": time,
        **{resource: cost.busy[resource] / 1e3 if resource in cost.busy else None for resource in RESOURCES},
        "critical": cost.critical,
        "floor by DMA": floor_dma,
        "floor by FLOPs": floor_flops,
        "ratio to floor": time / max(floor_dma, floor_flops),
        "SBUF KiB": cost.sbuf_bytes / 1024,
        "PSUM banks": cost.psum_banks,
    }


def _nbytes(item: Any) -> int:
    if isinstance(item, tuple | list):
        return sum(map(_nbytes, item))
    return item.nbytes if isinstance(item, np.ndarray) else 0


def table(selected: list[cases.Case]) -> list[dict[str, Any]]:
    """The rows of `selected` on trn1 and on trn2."""
    return [measure(case, generation) for case in selected for generation in cycles.TARGETS]


def markdown(rows: list[dict[str, Any]]) -> str:
    """`rows` as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(_text(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def with_measured(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """`rows` with a column of the times that `make test-neuron` wrote to the file, where it has them."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: `make test-neuron` writes it on a NeuronCore.")
    with path.open(newline="") as file:
        times = {tuple(row[name] for name in KEY): float(row["measured ms"]) for row in csv.DictReader(file)}
    found = []
    for row in rows:
        time = times.get(tuple(row[name] for name in KEY))
        found.append({**{name: row[name] for name in (*KEY, "ms")}, "measured ms": time, **row})
    return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def _write_into(text: str, path: Path) -> None:
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END} for the table to stand between.")
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    unfinished.replace(path)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write it to the files that are named."""
    parser = argparse.ArgumentParser(prog="python -m ssm_nki.cost", description=__doc__)
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument("--into", type=Path, help="also write the table between the markers of this Markdown file")
    parser.add_argument("--measured", type=Path, help="the file of `make test-neuron`: its times become a column")
    parser.add_argument("--kernel", help="only the kernel of this name")
    options = parser.parse_args(arguments)
    selected = [case for case in cases.all_cases() if options.kernel in (None, case.kernel)]
    if not selected:
        known = ", ".join(dict.fromkeys(case.kernel for case in cases.all_cases()))
        raise ValueError(f"There is no kernel {options.kernel!r}; there are {known}.")
    rows = table(selected)
    if options.measured:
        rows = with_measured(rows, options.measured)
    print(markdown(rows))
    if options.csv:
        _write_csv(rows, options.csv)
    if options.into:
        _write_into(markdown(rows), options.into)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
