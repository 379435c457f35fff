"""Which implementation of an op runs: each op offers its forms by name, and this file chooses.

    reference   the recurrence as a plain loop: the truth
    torch       custom operators that go from chunk to chunk: the default, on every device but a NeuronCore
    parallel    ordinary operators over all chunks at once, in graphs that grow with log(T): the default on NeuronCores
                and other XLA devices, where no kernel runs
    nki         kernels for AWS Trainium (ssm_trn.ops.nki): the default there; on CPU tensors they run in a simulator
    fla         a library of kernels for GPUs, which no op uses yet

Where a kernel lacks something, the torch form runs and one warning says why; but a size that is too large for a backend
that was asked for by name is an error. A single step (T = 1) never goes to a kernel.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ssm_trn.ops import nki

BACKENDS = ("reference", "torch", "parallel", "nki")
ACCELERATORS = ("xla", "neuron")  # types of devices on which kernels run without being asked for, if they can
DTYPES = (torch.float32, torch.bfloat16)  # that kernels take
# Options of ops that kernels lack, each with the value that leaves it out.
MISSING_OPTIONS = {"bonus": None, "erase": None, "negative_eigenvalues": False}
_chosen: str | None = None  # a plain global, which torch.compile can read
_warned: set[str] = set()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op inside the block with the backend `name`: "reference", "torch", "parallel" or "nki".

    What a backend has no form of (attention has no kernel, nor do some options) runs as torch, with one warning. A
    backward pass uses the backend of its forward pass.

    Raises:
        ValueError: for a name that is none of these ("fla" included, as no op has a form of it yet); and inside the
            block, for a size that a kernel cannot do.
    """
    global _chosen
    if name == "fla":
        raise ValueError("no op has an 'fla' form yet: use torch, which runs on a GPU too")
    if name not in BACKENDS:
        raise ValueError(f"unknown backend '{name}': choose one of {', '.join(BACKENDS)}")
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def select(op: str, forms: Mapping[str, Callable], device: torch.device) -> Callable:
    """The form of `op` to run where no kernel does: the one asked for by `use_backend`, else the device's default."""
    if _chosen == "nki" and op not in nki.KERNELS:
        _warn_once(f"{op} has no NKI kernel: one of its other forms runs")
    name = _chosen if _chosen is not None and _chosen in forms else "torch"
    # The torch forms write into views inside custom operators, and XLA's tensors lose what is written there.
    if name == "torch" and device.type in ACCELERATORS and "parallel" in forms:
        name = "parallel"
    return forms[name]


def find_kernel(op: str, arguments: Mapping[str, Any]) -> Callable | None:
    """The kernel to call with these arguments of `op`, or None where one of its other forms is to run.

    The first argument is a tensor, whose device counts.

    Raises:
        ValueError: if kernels were asked for by name, and one of the sizes is too large for this one.
    """
    device = next(iter(arguments.values())).device
    if _chosen != "nki" and (_chosen is not None or device.type not in ACCELERATORS):
        return None
    from ssm_nki.limits import supports  # the kernels' package is not needed before kernels are wanted

    obstacle = _absence(device) or _missing_option(op, arguments)
    if obstacle is None:
        shapes = {name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, Tensor)}
        obstacle = supports(op, shapes, {}).limit
        if obstacle is None:
            return nki.KERNELS[op]
        if _chosen == "nki":
            raise ValueError(f"{obstacle}; the torch backend has no such limit")
    form = "parallel" if device.type in ACCELERATORS else "torch"
    _warn_once(f"{op} runs in its {form} form: {obstacle}")
    return None


def require_complex(device: torch.device) -> None:
    """Raises ValueError on a NeuronCore, whose compiler has no complex numbers."""
    if device.type == "neuron" or (device.type == "xla" and _xla_kind() == "NEURON"):
        raise ValueError(
            "NeuronCores have no complex numbers, which lru and s4d compute with: "
            "choose another mixer (or s4d with init: real), or train it on another device"
        )


def _xla_kind() -> str:
    """What XLA devices are in this process: NEURON, CPU, ..."""
    return os.environ.get("PJRT_DEVICE", "NEURON")


def _absence(device: torch.device) -> str | None:
    """Why there are no kernels for tensors on this device; None where there are."""
    if device.type not in ("cpu", "xla", "meta"):
        return f"NKI kernels take XLA tensors on Trainium, or CPU tensors to be simulated, not {device.type} tensors"
    from ssm_nki import sdk  # it imports the SDK or, where there is none, the simulator

    if device.type == "xla":
        if not sdk.REAL:
            return "the Neuron SDK is not installed (there is no nki.jit), so there are no NKI kernels on this device"
        kind = _xla_kind()
        return None if kind == "NEURON" else f"PJRT_DEVICE={kind} makes XLA devices of something other than NeuronCores"
    if sdk.REAL and device.type == "cpu":
        return "where the Neuron SDK is installed, CPU tensors are simulated only with SSM_NKI_SIMULATE=1"
    return None


def _missing_option(op: str, arguments: Mapping[str, Any]) -> str | None:
    """What the kernel of `op` lacks of these arguments, in words; None where it lacks nothing."""
    for name, unused in MISSING_OPTIONS.items():
        if arguments.get(name, unused) is not unused:
            return f"its NKI kernel has no option {name}"
    if op == "selective_scan":
        for name in ("B", "C"):
            coefficient = arguments[name]
            if coefficient is not None and (coefficient.dim() == 2 or coefficient.shape[2] > 1):
                return f"its NKI kernel takes {name} for each step and in one group only"
    for name, x in arguments.items():
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.dtype not in DTYPES:
            return f"its NKI kernel takes float32 and bfloat16, and {name} is {x.dtype}".replace("torch.", "")
    return None


@torch.compiler.assume_constant_result  # torch.compile runs it while it compiles
def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)
