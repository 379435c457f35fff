"""Questions to a device that each kind of device answers in its own way."""

from typing import NamedTuple

import torch


class Memory(NamedTuple):
    """Bytes of a device's memory, and the most that this process has held of it; None where it does not tell."""

    size: int | None
    peak: int | None


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was told; an XLA device is told what has only been recorded."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync(wait=True)
    elif device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def memory(device: torch.device) -> Memory:
    """The memory of a GPU or a NeuronCore."""
    if device.type == "cuda":
        return Memory(torch.cuda.get_device_properties(device).total_memory, torch.cuda.max_memory_allocated(device))
    if device.type == "xla":
        import torch_xla.core.xla_model as xla_model

        facts = xla_model.get_memory_info(device)
        return Memory(facts.get("bytes_limit"), facts.get("peak_bytes_used") or facts.get("bytes_used"))
    return Memory(None, None)
