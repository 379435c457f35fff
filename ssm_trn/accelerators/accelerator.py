"""`--trainer.accelerator neuron`: the accelerator, and which strategy and precision go with it.

Lightning knows no NeuronCores: left to its own choice of a strategy it would train on the CPU and say nothing, and its
bf16-mixed would be CUDA's. So the project chooses (`trainer_settings`), and the accelerator refuses what is not chosen.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy

from ssm_trn.accelerators.detect import absence, choose_runtime, flavour
from ssm_trn.accelerators.precision import NeuronPrecision
from ssm_trn.accelerators.processes import process_settings
from ssm_trn.accelerators.single import SingleCoreStrategy, XLAExecution

logger = logging.getLogger(__name__)
NAME = "neuron"
_PRECISION_ALIASES = {"32": "32-true", "None": "32-true", "bf16": "bf16-mixed"}
_CORES_OF_A_CHIP = 2  # of trn1's


class NeuronAccelerator(Accelerator):
    """NeuronCores of either flavour. Devices are counted by processes, since torchrun starts one for each core."""

    def setup_device(self, device: torch.device) -> None:
        """Raises ValueError where Lightning chose the strategy itself, and with it the CPU."""
        if device.type != device_type():
            raise ValueError(
                f"the strategy trains on {device.type}, not on NeuronCores: "
                "make the trainer with Trainer(**settings | ssm_trn.accelerators.trainer_settings(settings))"
            )

    def setup(self, trainer: Trainer) -> None:
        """Raises ValueError for a precision that would train in another one than it says."""
        precision = trainer.precision_plugin
        if not isinstance(precision, NeuronPrecision) and type(precision) is not Precision:
            raise ValueError(
                f"{type(precision).__name__} is not made for NeuronCores: use ssm_trn.accelerators.NeuronPrecision"
            )

    def teardown(self) -> None:
        """Nothing: the runtime ends with the process."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """A number of cores. Which ones, the runtime decides: NEURON_RT_VISIBLE_CORES tells it."""
        if not re.fullmatch("[1-9][0-9]*", str(devices)):
            raise ValueError(
                f"trainer.devices is {devices}: on NeuronCores give their number, "
                "and name them with NEURON_RT_VISIBLE_CORES"
            )
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device(device_type(), index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """As many as torchrun started processes on this machine, and one without torchrun."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    @staticmethod
    def is_available() -> bool:
        return flavour() is not None

    @staticmethod
    def name() -> str:
        return NAME

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return {}


def device_type() -> str:
    """The type of a NeuronCore's device in PyTorch: "neuron" or "xla"."""
    return "neuron" if flavour() == "native" else "xla"


def core_count() -> int:
    """The NeuronCores of this machine that a process may use, found without starting their runtime."""
    if flavour() == "native":
        return torch.accelerator.device_count()
    if flavour() == "xla-cpu":
        return 1
    visible = os.environ.get("NEURON_RT_VISIBLE_CORES")
    if visible:
        ends = [[int(end) for end in part.split("-")] for part in visible.split(",")]
        return sum(end[-1] - end[0] + 1 for end in ends)
    count = os.environ.get("NEURON_RT_NUM_CORES")
    return int(count) if count else _CORES_OF_A_CHIP * len(list(Path("/dev").glob("neuron[0-9]*")))


def trainer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a Trainer must be given over `settings` to train on NeuronCores; nothing where they are not asked for.

    They are asked for by the accelerator "neuron", and by "auto" (or none) where there are any.

    Args:
        settings: arguments of a Trainer.

    Raises:
        ValueError: if they are asked for and there are none, or if they cannot do what the settings want.
    """
    accelerator = settings.get("accelerator") or "auto"
    if accelerator != NAME and not (accelerator == "auto" and flavour() is not None):
        return {}
    if flavour() is None:
        raise ValueError(absence())
    if settings.get("detect_anomaly"):
        raise ValueError("trainer.detect_anomaly reads every tensor, for which NeuronCores would stop: try it on a CPU")
    choose_runtime()
    processes = process_settings(settings)
    _tell_of_idle_cores()
    precision = str(settings.get("precision"))
    plugins = list(settings.get("plugins") or [])
    if not any(isinstance(plugin, Precision) for plugin in plugins):
        plugins.append(NeuronPrecision(_PRECISION_ALIASES.get(precision, precision), device_type()))
    return {
        "accelerator": NAME,
        "precision": None,
        "inference_mode": False,  # XLA's products of tensors made in it and outside are an error
        "plugins": plugins,
        "strategy": _strategy(settings.get("strategy") or "auto", int(os.environ.get("WORLD_SIZE", 1))),
    } | processes


def _tell_of_idle_cores() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and core_count() > 1:
        how = f"torchrun --nproc_per_node {core_count()} -m ssm_trn ..."
        logger.warning("one of %d NeuronCores is used: to train on all, start with %s", core_count(), how)


def _strategy(asked: Any, world_size: int) -> Strategy | str:
    """The strategy that the settings name, or the one for that many processes."""
    native = flavour() == "native"
    if native and asked == "fsdp2":
        return asked
    if isinstance(asked, Strategy):
        if isinstance(asked, XLAExecution) == native:
            raise ValueError(f"{type(asked).__name__} does not run on the device '{device_type()}': leave strategy out")
        return asked
    is_sharded = asked == "zero1" and not native
    if asked != "auto" and not is_sharded:
        raise ValueError(f"trainer.strategy {asked} does not run on the device '{device_type()}': leave it out")
    if native:
        from ssm_trn.accelerators.native import NativeDataParallelStrategy, NativeStrategy

        return NativeStrategy() if world_size == 1 else NativeDataParallelStrategy()
    if world_size == 1:
        return SingleCoreStrategy()
    from ssm_trn.accelerators.data_parallel import DataParallelStrategy

    return DataParallelStrategy(shard_optimizer=is_sharded)


if NAME not in AcceleratorRegistry:
    AcceleratorRegistry.register(NAME, NeuronAccelerator, description="AWS Trainium")
