"""Training with FSDP2: parameters, gradients and optimizer state are divided among the processes.

Zhao et al. 2023 (arXiv:2304.11277); `torch.distributed.fsdp.fully_shard` cuts each parameter by itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ssm_trn.model import LanguageModel

_BACKENDS = {"cuda": "nccl", "neuron": "neuron"}


class FullyShardedStrategy(ModelParallelStrategy):
    """`trainer.strategy: fsdp2`: all processes share one set of weights, each takes its part of a batch.

    A checkpoint is one file, the same that any other strategy writes and reads: the parts are brought together on the
    CPU of the first process, so that a run may go on with another number of processes, or with one. That process needs
    room for weights and optimizer state as a whole.
    """

    strategy_name = "fsdp2"

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.world_size
        super().setup_environment()

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients, of which this process holds parts."""
        return whole(get_total_norm(gradients))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._on_first_process(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._on_first_process(optimizer.state_dict())

    def load_checkpoint(self, checkpoint_path, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        parameters = dict(self.lightning_module.named_parameters())
        state = {name: _part(value, parameters.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            states = {
                index: {name: _part(value, parameters[index]) for name, value in state.items()}
                for index, state in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": states})

    def _on_first_process(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with whole tensors on the CPU; the other processes help, and keep names only."""

        def take(value: Any) -> Any:
            value = whole(value)
            if isinstance(value, Tensor):
                return value.cpu() if self.is_global_zero else torch.empty(0)
            return value

        return tree_map(take, state)

    def _get_process_group_backend(self) -> str:
        return _BACKENDS.get(self.root_device.type, "gloo")


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Divides the parameters of a model among the processes of a one-dimensional mesh.

    A block's parameters are gathered when it runs and let go behind it, those of embedding, last norm and head once a
    step. What is gathered together has one dtype: in a bfloat16 model each layer with bfloat16 weights is a group of
    its own, and what stays in float32 is the group around them. Gradients are summed in float32.
    """
    if isinstance(model, FSDPModule):
        return
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    inside = {module for block in model.blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in inside]
    for part, modules in [*((block, list(block.modules())) for block in model.blocks), (model, outside)]:
        for module in modules:
            dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
            if dtypes and torch.float32 not in dtypes:
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=part is not model)
        fully_shard(part, mesh=mesh, mp_policy=policy)


def whole(value: Any) -> Any:
    """All of a tensor of which each process holds a part: every process must ask. Other values stay as they are."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(value: Any, parameter: nn.Parameter | None) -> Any:
    """What this process holds of a value that is one with a parameter in shape, as its optimizer state is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


if FullyShardedStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(FullyShardedStrategy.strategy_name, FullyShardedStrategy, description="FSDP2")
