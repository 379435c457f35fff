"""ZeRO-1: each process keeps the optimizer's state of its part of every parameter.

Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1.

With W processes a parameter of n numbers is cut into W parts of ceil(n / W), the last filled up with zeros. A step is

    gradient part = mean of the gradients over the processes         reduce-scatter, in place of an all-reduce
    parameter part = optimizer(parameter part, gradient part)        a W-th of the state and of the arithmetic
    parameter = all parts                                            all-gather

and moves as many bytes as plain data parallelism. It is right for optimizers that treat each number by itself, as Adam
does.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ssm_trn.accelerators.collectives import Collectives, host_gather


class OptimizerShards:
    """Makes an optimizer that has not stepped yet one of this process's parts of its parameters.

    Args:
        optimizer: made for whole parameters, the same in all processes; from then on its groups hold the parts.
        collectives: of the parameters' device.
        rank: which parts are this process's.
        world_size: how many processes there are.
    """

    def __init__(self, optimizer: Optimizer, collectives: Collectives, rank: int, world_size: int) -> None:
        self._optimizer, self._collectives, self._rank, self._world_size = optimizer, collectives, rank, world_size
        self._whole: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            self._whole += group["params"]
            group["params"] = [nn.Parameter(self._part(parameter)) for parameter in group["params"]]
        optimizer.register_step_post_hook(self._collect)

    def reduce_gradients(self) -> None:
        """Gives each part the mean of its gradients over the processes, and frees those of the whole parameters."""
        for parameter, part in self._pairs():
            if parameter.grad is None:
                part.grad = None
            else:
                part.grad = self._collectives.reduce_scatter(self._padded(parameter.grad), 1 / self._world_size)
                parameter.grad = None

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the gradients of which this process holds parts."""
        square = get_total_norm(gradients).square()
        self._collectives.all_reduce([square])
        return square.sqrt()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as it would be without parts; every process must ask."""
        saved = self._optimizer.state_dict()
        pairs = list(self._pairs())

        def whole(value: Any, parameter: nn.Parameter, part: nn.Parameter) -> Any:
            if not isinstance(value, Tensor) or value.shape != part.shape:
                return value
            return torch.cat(host_gather(value))[: parameter.numel()].view(parameter.shape)

        return saved | {"state": _mapped(saved["state"], lambda index, value: whole(value, *pairs[index]))}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes this process's parts of a state without parts, whatever number of processes saved it."""

        def part(index: int, value: Any) -> Any:
            is_cut = isinstance(value, Tensor) and value.shape == self._whole[index].shape
            return self._part(value) if is_cut else value

        self._optimizer.load_state_dict(saved | {"state": _mapped(saved["state"], part)})

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        parts = (part for group in self._optimizer.param_groups for part in group["params"])
        return zip(self._whole, parts, strict=True)

    def _padded(self, tensor: Tensor) -> Tensor:
        """A tensor as [W * ceil(n / W)]."""
        return F.pad(tensor.flatten(), (0, -tensor.numel() % self._world_size))

    def _part(self, tensor: Tensor) -> Tensor:
        # Cut on the CPU: on the device the place of the part would be a constant of the graph, and each process would
        # compile a graph of its own.
        return self._padded(tensor.detach().cpu()).chunk(self._world_size)[self._rank].clone().to(tensor.device)

    @torch.no_grad()
    def _collect(self, *_: Any) -> None:
        for parameter, part in self._pairs():
            parameter.copy_(self._collectives.all_gather(part)[: parameter.numel()].view(parameter.shape))


def _mapped(states: dict[int, dict[str, Any]], change: Any) -> dict[int, dict[str, Any]]:
    return {index: {name: change(index, value) for name, value in state.items()} for index, state in states.items()}
