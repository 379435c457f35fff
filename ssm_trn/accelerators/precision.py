"""Precision on NeuronCores: the same three choices for both flavours."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


class NeuronPrecision(Precision):
    """What `trainer.precision` means on NeuronCores.

        32-true     everything float32
        bf16-true   the model cast to bfloat16; what `Float32Parameters` holds stays float32
        bf16-mixed  float32 parameters, matrix products in bfloat16 by autocast

    torch-xla's variable XLA_USE_BF16, with which Lightning does this on TPUs, is not used: it turns the optimizer's
    moments into bfloat16 too, and says they were float32.

    Args:
        precision: one of the three.
        device_type: "xla" or "neuron", which autocast must know.
    """

    def __init__(self, precision: str, device_type: Literal["xla", "neuron"]) -> None:
        if precision not in PRECISIONS:
            raise ValueError(
                f"trainer.precision {precision} does not run on NeuronCores: choose one of {', '.join(PRECISIONS)}"
            )
        self.precision = precision
        self.device_type = device_type

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.bfloat16() if self.precision == "bf16-true" else module

    def forward_context(self) -> AbstractContextManager:
        return torch.autocast(self.device_type, torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext()
