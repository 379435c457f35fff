"""What Lightning must know to train on NeuronCores, behind the one flag `--trainer.accelerator neuron`.

Nothing else in the project imports torch_xla or torch_neuronx. Lightning itself is imported when one of the names that
need it is asked for, as a program may only want to know the flavour.
"""

from importlib import import_module
from typing import Any

from ssm_trn.accelerators.detect import FLAVOURS, absence, flavour

_OF_LIGHTNING = {
    "NeuronAccelerator": "accelerator",
    "trainer_settings": "accelerator",
    "NeuronPrecision": "precision",
    "SingleCoreStrategy": "single",
    "DataParallelStrategy": "data_parallel",
    "NativeStrategy": "native",
    "NativeDataParallelStrategy": "native",
    "CompileWatch": "compile_watch",
    "process_settings": "processes",
}

__all__ = ["FLAVOURS", "absence", "flavour", *_OF_LIGHTNING]


def __getattr__(name: str) -> Any:
    if name not in _OF_LIGHTNING:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_OF_LIGHTNING[name]}"), name)
