"""Graphs of training steps on XLA devices without kernels: whether they stay small as sequences grow.

SSM_TRN_NEURON=xla-cpu python -m ssm_trn.bench.graphs      measures, and writes results.json and README.md
python -m ssm_trn.bench.graphs --report                    only makes README.md from results.json anew

It takes the environment of `make test-xla`. The step is the forward and backward pass of a model of one layer.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn.config import ModelConfig
from ssm_trn.files import write_whole
from ssm_trn.model import LanguageModel
from ssm_trn.results import FORMAT_VERSION, RESULTS_FILE, machine_facts, markdown_table, read_results, write_results

MIXERS = ("mamba", "mamba2", "gated_deltanet")
LENGTHS = (512, 2048)
FOLDER = "docs/graphs"
VOCABULARY, WIDTH, BATCH = 64, 64, 2


def measure_one(mixer: str, length: int, compiled: bool = True) -> dict[str, Any]:
    """The row of one model and length."""
    from ssm_trn.accelerators.detect import xla_device
    from ssm_trn.accelerators.graphs import graph_of

    torch.manual_seed(0)
    device = xla_device()
    model = LanguageModel(ModelConfig(VOCABULARY, WIDTH, [mixer])).to(device)
    tokens = torch.randint(VOCABULARY, (BATCH, length + 1)).to(device)
    graph = graph_of(lambda: loss_and_gradients(model, tokens), compiled)
    return {"mixer": mixer, "length": length, **graph._asdict()}


def loss_and_gradients(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    logits, _ = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def growth(rows: Sequence[dict[str, Any]], mixer: str) -> float:
    """Instructions of the longest sequence over those of the shortest."""
    counts = {row["length"]: row["instructions"] for row in rows if row["mixer"] == mixer}
    return counts[max(counts)] / counts[min(counts)]


def write_report(results: dict[str, Any], folder: Path) -> None:
    """README.md, all from the results."""
    rows, lines = results["graphs"], []
    for row in rows:
        of_shortest = growth([r for r in rows if r["length"] <= row["length"]], row["mixer"])
        lines.append(
            [
                row["mixer"],
                f"{row['length']:,}",
                f"{row['instructions']:,}",
                f"{of_shortest:.2f}x",
                f"{row['compile_seconds']:.1f} s",
                ", ".join(row["fallbacks"]) or "none",
            ]
        )
    header = ("mixer", "T", "HLO instructions", "of the shortest", "compile time", "CPU fallbacks")
    machine = results["machine"]
    text = f"""# Graphs of a training step on XLA devices without kernels

{markdown_table(header, lines)}

Forward and backward pass of a language model of one layer, {results["width"]} wide, with {results["batch"]} sequences
of T tokens, in float32, in the ops' parallel form (`ssm_trn/ops/parallel.py`). Instructions are of the graph as traced,
before XLA changes it. Compile times are those of XLA's CPU compiler, not of neuronx-cc: they show growth, not what to
wait for on Trainium. Fallbacks are operations that would leave the device within the step.

Measured on {machine["processor"]}, torch {machine["torch"]} and torch-xla's CPU client; in the environment of
`make test-xla`:

    SSM_TRN_NEURON=xla-cpu python -m ssm_trn.bench.graphs
"""
    write_whole(folder / "README.md", text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="where the files go")
    parser.add_argument("--report", action="store_true", help="measure nothing, report on the results in the folder")
    options = parser.parse_args(arguments)
    if not options.report:
        rows = [measure_one(mixer, length) for mixer in MIXERS for length in LENGTHS]
        results = {"format_version": FORMAT_VERSION, "machine": machine_facts(), "width": WIDTH, "batch": BATCH}
        options.folder.mkdir(parents=True, exist_ok=True)
        write_results(options.folder / RESULTS_FILE, results | {"graphs": rows})
    write_report(read_results(options.folder / RESULTS_FILE, "graphs"), options.folder)
    print((options.folder / "README.md").read_text())


if __name__ == "__main__":
    main()
