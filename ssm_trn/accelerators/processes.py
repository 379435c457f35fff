"""The processes of a training. torchrun starts them, one for each device; this project starts none itself."""

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed import is_torchelastic_launched


def process_settings(settings: Mapping[str, Any]) -> dict[str, int]:
    """`devices` and `num_nodes` of a Trainer as torchrun started them; one device where it did not.

    Args:
        settings: arguments of a Trainer.

    Raises:
        ValueError: if the settings say otherwise.
    """
    devices = "auto" if settings.get("devices") in (None, -1, "-1") else settings["devices"]
    if devices == "auto":
        devices = int(os.environ["LOCAL_WORLD_SIZE"]) if is_torchelastic_launched() else 1
    return {"devices": devices, "num_nodes": machine_count(_count(devices), settings.get("num_nodes") or 1)}


def machine_count(devices: int, machines: int) -> int:
    """How many machines train together. Raises ValueError if that many devices and machines are not what runs."""
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if devices != local or machines not in (1, world // local):
        there = "there is one process" if world == 1 else f"{world} processes run, {local} on this machine"
        raise ValueError(
            f"trainer.devices is {devices} and trainer.num_nodes {machines}, but {there}: start one process for each "
            f"device with torchrun --nproc_per_node {devices} -m ssm_trn, which needs neither setting"
        )
    return world // local


def _count(devices: Any) -> int:
    """How many devices a Trainer's `devices` names: a number, or a list of indices."""
    if isinstance(devices, str) and "," in devices:
        devices = devices.strip(",").split(",")
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
    if count < 1:
        raise ValueError(f"trainer.devices is {devices}: give the number of devices, or auto")
    return count
