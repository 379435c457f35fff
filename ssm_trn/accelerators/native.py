"""NeuronCores through TorchNeuron, where "neuron" is a device like any other: Lightning's own strategies nearly do."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from ssm_trn.accelerators.single import KeepsTies


class NativeStrategy(KeepsTies, SingleDeviceStrategy):
    """Trains on one NeuronCore."""

    strategy_name = "neuron_native"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(device=torch.device("neuron", 0), **kwargs)


class NativeDataParallelStrategy(KeepsTies, DDPStrategy):
    """Trains copies of the model on several NeuronCores, a process for each, and averages their gradients."""

    strategy_name = "neuron_native_data_parallel"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(process_group_backend="neuron", **kwargs)

    def determine_ddp_device_ids(self) -> None:
        """None, as for a CPU: with ids Lightning would open a stream of CUDA."""
