"""Which way to NeuronCores there is in this process. Nothing is imported here before it is asked for.

native    TorchNeuron: PyTorch has a device "neuron" of its own (trn2, trn3)
xla       torch-neuronx on torch-xla 2.9: the device "xla" is a NeuronCore (trn1)
xla-cpu   the same strategies on torch-xla's CPU client, to try and test them without hardware; only on request
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

Flavour = Literal["native", "xla", "xla-cpu"]
FLAVOURS: tuple[Flavour, ...] = ("native", "xla", "xla-cpu")
VARIABLE = "SSM_TRN_NEURON"  # names the flavour instead of what is found
FIRST_DEVICE = Path("/dev/neuron0")  # the kernel driver's

# Lightning asks at every start whether there is a TPU, and torch-xla takes 5 seconds to ask a server of Google's. These
# two settings of its own answer without; the first one alone makes the question fail.
if find_spec("torch_xla") is not None:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")


def flavour() -> Flavour | None:
    """The way to NeuronCores of this process: what SSM_TRN_NEURON says, else what is found; None if there is none.

    Raises:
        ValueError: if SSM_TRN_NEURON is none of `FLAVOURS`.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        if wanted not in FLAVOURS:
            raise ValueError(f"{VARIABLE} is '{wanted}': make it one of {', '.join(FLAVOURS)}, or leave it unset")
        return wanted
    return _find()[0]


def choose_runtime() -> None:
    """Makes sure that the flavour can run here, and tells torch-xla which devices are meant before it looks for some.

    Raises:
        ValueError: if SSM_TRN_NEURON names a flavour that is not installed, or PJRT_DEVICE another kind of device.
    """
    name = flavour()
    if name == "native":
        needed, is_there = "device 'neuron' in PyTorch", _find()[0] == "native"
    else:
        needed, is_there = "torch_xla", find_spec("torch_xla") is not None
    if not is_there:
        how = f"install it as docs/trainium.md says, or unset {VARIABLE}"
        raise ValueError(f"{VARIABLE} is '{name}', and there is no {needed}: {how}")
    if name == "native":
        return
    kind = "CPU" if name == "xla-cpu" else "NEURON"
    if os.environ.setdefault("PJRT_DEVICE", kind) != kind:
        raise ValueError(
            f"PJRT_DEVICE is {os.environ['PJRT_DEVICE']}, and the flavour {name} needs {kind}: unset it, "
            f"or set {VARIABLE}=xla-cpu to try the XLA path on a CPU"
        )


def xla_device() -> torch.device:
    """The XLA device of this process, with which torch-xla's runtime starts: not for one that only asks."""
    choose_runtime()
    import torch_xla

    return torch_xla.device()


def absence() -> str:
    """One sentence that says what was looked for, for the error where `flavour()` is None."""
    return (
        f"there is no NeuronCore to train on: {_find()[1]}; "
        f"choose --trainer.accelerator cpu, or install the Neuron SDK as docs/trainium.md says"
    )


@cache
def _find() -> tuple[Flavour | None, str]:
    """The flavour, and what is missing for each."""
    found = torch.accelerator.current_accelerator()
    if found is not None and found.type == "neuron":
        return "native", ""
    missing = "PyTorch has no device 'neuron' (TorchNeuron, for trn2 and trn3), and for trn1 "
    if not FIRST_DEVICE.exists():
        return None, missing + f"there is no {FIRST_DEVICE}"
    for name in ("torch_xla", "torch_neuronx"):
        try:
            import_module(name)  # being found is not enough: PyPI has packages of these names that are none
        except Exception as error:
            return None, missing + f"{name} cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    return "xla", ""
