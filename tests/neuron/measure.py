"""Kernels on a NeuronCore: whether they compute what torch does, and how long they take beside what is modelled.

The same functions run with `Simulated` in place of a NeuronCore, which only shows that they work.
"""

import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssm_nki import sdk
from ssm_nki.cases import Case
from ssm_nki.simulator import Machine
from ssm_trn import ops
from ssm_trn.files import replacing
from ssm_trn.ops.nki_operators import tensor_of
from tests.ops import cases as ops_cases
from tests.ops.test_properties import error

KEY = ("kernel", "direction", "shape", "target")
FIELDS = (*KEY, "measured ms", "modelled ms", "measured / modelled", "launch ms", "repeats")
TARGETS = {"trn1": "trn1", "inf2": "trn1", "gen2": "trn1", "trn2": "trn2", "gen3": "trn2"}
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")  # the instance type, on AWS


class NeuronCore:
    """One NeuronCore, by torch-xla.

    Raises:
        LookupError: if there is none, saying what is missing.
    """

    def __init__(self) -> None:
        if not sdk.REAL:
            raise LookupError("no NeuronCore: the Neuron SDK is not installed (there is no nki.jit)")
        try:
            import torch_xla
        except ImportError as missing:
            raise LookupError("no NeuronCore: torch_xla is not installed") from missing
        if os.environ.get("PJRT_DEVICE") != "NEURON":
            raise LookupError("no NeuronCore: set PJRT_DEVICE=NEURON")
        self.torch_xla, self.device, self.target = torch_xla, torch_xla.device(), target_of_this_machine()

    def put(self, array: np.ndarray) -> Tensor:
        return tensor_of(array).to(self.device)

    def run(self, function: Callable, *arguments: Any) -> None:
        """Computes the results of a function on the device and waits for them."""
        results = function(*arguments)
        self.torch_xla.sync(wait=True)
        del results


class Simulated:
    """The simulator without its arithmetic: a stand-in whose times mean nothing."""

    target, device = "trn1", torch.device("cpu")

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def run(self, function: Callable, *arguments: Any) -> None:
        if hasattr(function, "portable"):
            Machine(self.target, compute=False).run(function, *arguments)
        else:
            function(*arguments)


def target_of_this_machine() -> str:
    """ "trn1" or "trn2", by the instance type or NEURON_PLATFORM_TARGET_OVERRIDE."""
    name = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or (PRODUCT.read_text() if PRODUCT.exists() else "")
    found = re.match("|".join(TARGETS), name.strip().lower())
    if found is None:
        raise LookupError(f"this machine is '{name.strip()}': NEURON_PLATFORM_TARGET_OVERRIDE=trn1 or trn2 says which")
    return TARGETS[found.group()]


def modelled(*options: str) -> dict[tuple[str, ...], float]:
    """Milliseconds by KEY, as `python -m ssm_nki.cost` has them: by the simulator, so in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "cost.csv")
        command = [sys.executable, "-m", "ssm_nki.cost", "--csv", str(table), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with table.open(newline="") as file:
            return {tuple(row[name] for name in KEY): float(row["ms"]) for row in csv.DictReader(file)}


def median_ms(device: Any, function: Callable, arguments: list, repeats: int) -> float:
    """Median latency of a call, in milliseconds, after one call that compiles and one that warms up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        device.run(function, *arguments)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def time_case(case: Case, device: Any, model: dict[tuple[str, ...], float], repeats: int = 30) -> dict[str, Any]:
    """The row of a kernel: its latency from the host's side, and that of a graph that does next to nothing."""
    kernel, arguments = case.build()
    arguments = [device.put(x) if isinstance(x, np.ndarray) else x for x in arguments]
    key = (case.kernel, case.direction, case.shape, device.target)
    measured = median_ms(device, kernel, arguments, repeats)
    launch = median_ms(device, lambda x: x + 1, [device.put(np.zeros(1, np.float32))], repeats)
    numbers = (measured, model[key], measured / model[key], launch, repeats)
    return dict(zip(FIELDS, (*key, *numbers), strict=True))


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to the table, in place of an earlier one of the same kernel, direction, shape and target."""
    rows = []
    if path.exists():
        with path.open(newline="") as file:
            rows = [old for old in csv.DictReader(file) if any(old[name] != row[name] for name in KEY)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows([*rows, {name: f"{x:.4f}" if isinstance(x, float) else x for name, x in row.items()}])


def compare(case: ops_cases.Case, device: torch.device, length: int, dtype: torch.dtype) -> list[float]:
    """Relative errors of the kernel on the device against torch on the host: of results, then of gradients."""
    sizes = ops_cases.Sizes(batch=1, heads=4, keys=32, values=32)
    inputs, state = case.inputs(length, dtype, sizes=sizes), case.state(dtype, sizes=sizes)
    reset = torch.rand(1, length, generator=torch.Generator().manual_seed(1)) < 0.02
    found = _results(case, inputs, state, reset, device, "nki")
    expected = _results(case, inputs, state, reset, torch.device("cpu"), "torch")
    return [error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]


def _results(case: ops_cases.Case, inputs, state, reset: Tensor, device: torch.device, backend: str) -> list[Tensor]:
    inputs = {name: x.to(device).detach().requires_grad_() for name, x in inputs.items()}
    state = tuple(x.to(device).detach().requires_grad_() for x in state)
    with ops.use_backend(backend):
        out, final = case(inputs, state, reset=reset.to(device))
    results = [out, *final]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype).to(device) for x in results]
    gradients = torch.autograd.grad(results, [*inputs.values(), *state], weights, materialize_grads=True)
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()  # one graph of all, not one for each that is read
    return [x.detach().cpu() for x in (*results, *gradients)]
