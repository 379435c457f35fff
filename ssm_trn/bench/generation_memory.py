"""Memory while a model generates: of a recurrent model, a hybrid with a window of attention, and a transformer.

python -m ssm_trn.bench.generation_memory              measures 4,000 tokens of each: runs/generation/results.json
python -m ssm_trn.bench.generation_memory --report     only makes report.md and memory.svg from it anew

Each model generates in a fresh process, with a state that is not made for all tokens in advance and so grows with what
the model remembers. Blocks that are freed go back to the system at once: what the process holds is what it uses.
"""

import argparse
import ctypes
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ssm_trn.bench.measure import process_memory
from ssm_trn.bench.step import PARAMETERS, VOCABULARY, WIDTH, model_config
from ssm_trn.config import ModelConfig
from ssm_trn.files import write_whole
from ssm_trn.generation import Generation, Sampling
from ssm_trn.matching import match_parameters
from ssm_trn.model import LanguageModel
from ssm_trn.ops.contexts import one_thread
from ssm_trn.results import (
    FORMAT_VERSION,
    RESULTS_FILE,
    machine_facts,
    markdown_table,
    new_figure,
    read_results,
    save_figure,
    write_results,
)
from ssm_trn.state import map_state

SAMPLES = 40
_M_MMAP_THRESHOLD = -3


def model_configs() -> dict[str, ModelConfig]:
    """Models of 10 million parameters, as `ssm-trn bench step` has them."""
    hybrid: list[Any] = ["gated_deltanet", "gated_deltanet", {"mixer": "attention", "window": 128}] * 2
    return {
        "Mamba-2": model_config("mamba2", feed_forward=False),
        "hybrid": match_parameters(ModelConfig(VOCABULARY, WIDTH, hybrid), PARAMETERS),
        "transformer": model_config("attention"),
    }


def measure(configs: Mapping[str, ModelConfig], tokens: int) -> dict[str, Any]:
    """What results.json holds: for each model its memory after each 40th part of the tokens."""
    if sys.platform != "linux":
        raise ValueError("the memory of a process is read from /proc: measure on Linux")
    if tokens < SAMPLES:
        raise ValueError(f"tokens is {tokens}; it must be at least {SAMPLES}")
    with one_thread():
        machine = machine_facts()
    memory = {}
    for name, config in configs.items():
        print(f"{name} ...", flush=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
            memory[name] = fresh_process.submit(follow, config, tokens).result()
    command = "python -m ssm_trn.bench.generation_memory"
    return {"format_version": FORMAT_VERSION, "command": command, "machine": machine, "memory": memory}


def follow(config: ModelConfig, tokens: int) -> dict[str, Any]:
    """Generates one sequence and looks at the memory on the way: of this process, and of the model's state."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel(config).eval()
    list(Generation(model, [[1]], 8))  # code that runs for the first time takes memory of its own
    samples: dict[str, list[int]] = {"tokens": [], "state_bytes": [], "process_bytes": []}
    before = process_memory("VmRSS")
    generation = Generation(model, [[1]], tokens, sampling=Sampling(temperature=1.0), state=model.init_state(1, 1))
    for count, _ in enumerate(generation, 1):
        if count % (tokens // SAMPLES) == 0:
            samples["tokens"].append(count)
            samples["state_bytes"].append(state_bytes(generation.state))
            samples["process_bytes"].append(process_memory("VmRSS") - before)
    return {"parameters": model.parameter_count(), "config": config.to_dict(), **samples}


def state_bytes(state) -> int:
    """Bytes of memory that the tensors of a state hold."""
    sizes: list[int] = []

    def count(part: torch.Tensor) -> torch.Tensor:
        sizes.append(part.untyped_storage().nbytes())
        return part

    map_state(count, state)
    return sum(sizes)


def write_report(results: dict[str, Any], folder: Path) -> None:
    """report.md and memory.svg in `folder`."""
    plot(results, folder / "memory.svg")
    machine = results["machine"]
    notes = (
        "State: what the model remembers, in float32. Process: by how much it has grown since the model was made and "
        "had generated once. One sequence, sampled at temperature 1; each model in a process of its own, on one "
        "thread, with a state that is not made for all tokens in advance.\n\n"
        f"{machine['processor']}, Python {machine['python']}, PyTorch {machine['torch']}, ssm_trn "
        f"{machine['ssm_trn']}. Made by `{results['command']}`."
    )
    parts = ["# Memory while generating", table(results), notes, "![Memory over generated tokens](memory.svg)"]
    write_whole(folder / "report.md", "\n\n".join(parts) + "\n")


def table(results: dict[str, Any]) -> str:
    """Memory near the beginning and at the end of the generation, a row for each model."""
    first, last = (next(iter(results["memory"].values()))["tokens"][end] for end in (0, -1))
    header = ["model", "parameters"]
    header += [f"{what} after {count:,} tokens" for what in ("state", "process") for count in (first, last)]
    rows = []
    for name, model in results["memory"].items():
        amounts = (model[f"{what}_bytes"][end] for what in ("state", "process") for end in (0, -1))
        rows.append([name, f"{model['parameters']:,}", *(f"{amount / 2**20:,.1f} MiB" for amount in amounts)])
    return markdown_table(header, rows)


def plot(results: dict[str, Any], path: Path) -> None:
    """State and growth of the process over the tokens."""
    figure, axes = new_figure("generated tokens", "memory in MiB")
    for number, (name, model) in enumerate(results["memory"].items()):
        for what, style in (("process", "-"), ("state", "--")):
            amounts = [amount / 2**20 for amount in model[f"{what}_bytes"]]
            axes.plot(model["tokens"], amounts, style, color=f"C{number}", label=f"{name}: {what}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    save_figure(figure, axes, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default="runs/generation", help="where the files go")
    parser.add_argument("--tokens", type=int, default=4000, help="how many tokens each model generates")
    parser.add_argument("--report", action="store_true", help="measure nothing, report on the results in the folder")
    options = parser.parse_args(arguments)
    if not options.report:
        results = measure(model_configs(), options.tokens)
        options.folder.mkdir(parents=True, exist_ok=True)
        write_results(options.folder / RESULTS_FILE, results)
    results = read_results(options.folder / RESULTS_FILE, "memory")
    write_report(results, options.folder)
    print(table(results))


if __name__ == "__main__":
    main()
