"""Sums over the processes of a training on XLA devices, one process for each NeuronCore.

What training computes with stays on the device and is part of its graph (`OnDevice`). What Python reads at once - a
decision, a count, text, the state of an optimizer - goes from CPU to CPU through gloo: nothing has to be compiled for
it, and no device is waited for.

The CPU client of torch-xla knows of no other process: its collectives return their input. There gloo does all of it
(`ThroughHost`), which is slow and exact, so that everything but the three calls of `OnDevice` can be tested without
hardware.
"""

import json
from typing import Any, Protocol

import torch
import torch.distributed as distributed
from torch import Tensor

from ssm_trn.accelerators.detect import flavour

_BUCKET_MEGABYTES = 50  # gradients that are summed in one operation: the summing of some overlaps the making of others


class Collectives(Protocol):
    """Sums of tensors of the device; every process calls the same in the same order."""

    def all_reduce(self, tensors: list[Tensor], scale: float = 1.0) -> None:
        """Replaces each tensor by `scale` times the sum of those of all processes."""

    def reduce_scatter(self, tensor: Tensor, scale: float = 1.0) -> Tensor:
        """This process's part [n] of `scale` times the sum of all processes' tensors [processes * n]."""

    def all_gather(self, part: Tensor) -> Tensor:
        """All parts [n], one after the other [processes * n]."""


class OnDevice:
    """The collectives of the Neuron runtime, inside the graph."""

    # Without pinned layouts: torch-xla makes a pinned gather out of a sum of arrays that are zero but for one part,
    # which moves as many times the bytes as there are processes.

    def all_reduce(self, tensors: list[Tensor], scale: float = 1.0) -> None:
        import torch_xla.core.xla_model as xla_model

        xla_model.all_reduce_bucketized_gradients(
            tensors, scale, groups=None, pin_layout=True, bucket_cap_mb=_BUCKET_MEGABYTES
        )

    def reduce_scatter(self, tensor: Tensor, scale: float = 1.0) -> Tensor:
        import torch_xla.core.xla_model as xla_model

        processes = distributed.get_world_size()
        return xla_model.reduce_scatter(
            xla_model.REDUCE_SUM, tensor, scale, scatter_dim=0, shard_count=processes, pin_layout=False
        )

    def all_gather(self, part: Tensor) -> Tensor:
        import torch_xla.core.xla_model as xla_model

        return xla_model.all_gather(part, dim=0, pin_layout=False)


class ThroughHost:
    """The same by way of the CPU, for XLA devices that have no collectives; each call cuts the graph in two."""

    def all_reduce(self, tensors: list[Tensor], scale: float = 1.0) -> None:
        for tensor in tensors:
            tensor.copy_(host_sum(tensor) * scale)

    def reduce_scatter(self, tensor: Tensor, scale: float = 1.0) -> Tensor:
        part = host_sum(tensor).chunk(distributed.get_world_size())[distributed.get_rank()]
        return (part * scale).to(tensor.device)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(host_gather(part)).to(part.device)


def collectives() -> Collectives:
    """Those of this process's devices."""
    return ThroughHost() if flavour() == "xla-cpu" else OnDevice()


def host_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor of all processes, on the CPU."""
    total = tensor.detach().cpu().clone()
    distributed.all_reduce(total)
    return total


def host_gather(tensor: Tensor) -> list[Tensor]:
    """The tensors of all processes, which have the same shape, on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, tensor)
    return parts


def host_broadcast(value: Any, source: int = 0) -> Any:
    """The plain value (what JSON has) that the process `source` holds.

    Text, not pickles: what comes over a network is not executed.
    """
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([content.numel()])
    distributed.broadcast(size, source)
    if distributed.get_rank() != source:
        content = torch.empty(int(size), dtype=torch.uint8)
    distributed.broadcast(content, source)
    return json.loads(bytes(content.tolist()))
