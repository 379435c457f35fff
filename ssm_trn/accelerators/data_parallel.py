"""Several NeuronCores through XLA: copies of the model, one process for each core, which torchrun starts."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as distributed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ssm_trn.accelerators.collectives import collectives, host_broadcast, host_gather, host_sum
from ssm_trn.accelerators.detect import xla_device
from ssm_trn.accelerators.single import XLAExecution
from ssm_trn.accelerators.zero import OptimizerShards


class _Processes(ParallelStrategy):
    """The processes that torchrun started, which talk to each other from CPU to CPU.

    Who they are is in the variables that torchrun set. The XLA runtime is not asked: on a CPU it takes each process for
    the only one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_nodes = 1  # the Trainer sets it

    @property
    def root_device(self) -> torch.device:
        return xla_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def is_distributed(self) -> bool:
        """What a Trainer asks strategies that are not Lightning's."""
        return True

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
        super().setup_environment()

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return host_broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """[processes, ...], without a gradient."""
        return torch.stack(host_gather(tensor)).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = int(host_sum(torch.tensor(int(decision))))
        return votes == self.world_size if all else votes > 0


class DataParallelStrategy(XLAExecution, _Processes):
    """Trains copies of the model on several NeuronCores and averages their gradients.

    Args:
        shard_optimizer: each core keeps only its part of the optimizer's state (ZeRO-1), which lets a larger model fit.
            A checkpoint is the same with and without it, and for any number of cores.
    """

    strategy_name = "neuron_data_parallel"

    def __init__(self, shard_optimizer: bool = False) -> None:
        super().__init__()
        self._shard_optimizer = shard_optimizer
        self._shards: list[OptimizerShards] = []

    def setup(self, trainer: Trainer) -> None:
        self._collectives = collectives()
        for tensor in self.model.state_dict().values():  # still on the CPU: nothing to compile
            distributed.broadcast(tensor, 0)
        super().setup(trainer)
        # With it Lightning asks before each batch, by a tensor on the device that it waits for, whether to stop;
        # training/faults.py does so where a wait costs nothing.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._shard_optimizer:
            self._shards = [
                OptimizerShards(optimizer, self._collectives, self.global_rank, self.world_size)
                for optimizer in self.optimizers
            ]

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        if self._shard_optimizer:
            self._shards_of(optimizer).reduce_gradients()
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # From the last layer on, whose gradients are ready first.
        gradients = [parameter.grad for parameter in reversed(parameters) if parameter.grad is not None]
        self._collectives.all_reduce(gradients, 1 / self.world_size)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the averaged gradients, of which this process may hold parts."""
        return self._shards[0].total_norm(gradients) if self._shard_optimizer else get_total_norm(gradients)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum or the mean of a number or a tensor over all processes.

        A float32 tensor on the device stays there, as a part of the graph. All else is what Python is about to read.
        """
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in ("sum", "mean", "avg"):
            raise ValueError(f"reduce_op is {reduce_op}: between NeuronCores there are sum and mean")
        scale = 1.0 if name == "sum" else 1 / self.world_size
        if isinstance(tensor, Tensor) and tensor.device.type == "xla" and tensor.dtype == torch.float32:
            result = tensor.detach().clone()
            self._collectives.all_reduce([result], scale)
            return result
        total = host_sum(torch.as_tensor(tensor))
        return total if name == "sum" else total * scale

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._shard_optimizer:
            return super().optimizer_state(optimizer)
        self.synchronize()
        return self._shards_of(optimizer).state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._shard_optimizer:
            return super().load_optimizer_state_dict(checkpoint)
        for shards, state in zip(self._shards, checkpoint["optimizer_states"], strict=True):
            shards.load_state_dict(state)

    def _shards_of(self, optimizer: Optimizer) -> OptimizerShards:
        return self._shards[self.optimizers.index(getattr(optimizer, "optimizer", optimizer))]
