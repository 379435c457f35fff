"""One NeuronCore through XLA, and what every strategy on XLA devices shares."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import find_shared_parameters, set_shared_parameters
from lightning_utilities import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from ssm_trn.accelerators.detect import xla_device


class KeepsTies:
    """For a strategy: parameters that are one stay one on the device and back.

    To a device of another kind `Module.to` makes a new parameter for each name, so that tied weights would part.
    """

    def model_to_device(self) -> None:
        shared = find_shared_parameters(self.model)
        super().model_to_device()
        set_shared_parameters(self.model, shared)

    def teardown(self) -> None:
        module = self.lightning_module
        shared = [] if module is None else find_shared_parameters(module)
        super().teardown()
        if module is not None:
            set_shared_parameters(module, shared)


class XLAExecution(KeepsTies):
    """For a strategy on XLA devices: where the graphs end.

    Operations on XLA tensors are recorded; `synchronize` compiles what was recorded since the last time, unless the
    same was compiled before, and starts it without waiting for the end. A graph ends

        after each optimizer step: forward, backward, clipping and update are one graph;
        after each backward pass where gradients are accumulated: else the passes of all micro-batches would be one
            graph, which takes as many times as long to compile;
        after each batch of a validation or a test, for the same reason;
        before all of these and before a checkpoint, so that what callbacks may have recorded changes none of them.

    Checkpoints hold tensors on the CPU.
    """

    def synchronize(self) -> None:
        import torch_xla

        torch_xla.sync()

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """Averages the gradients over all processes before they are clipped; with one there is nothing to do."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.synchronize()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize()
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        if self.lightning_module.trainer.accumulate_grad_batches > 1:
            self.synchronize()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model=None, **kwargs: Any) -> Any:
        def closure_with_reduction() -> Any:
            loss = closure()
            self.reduce_gradients(optimizer)
            return loss

        output = super().optimizer_step(optimizer, closure_with_reduction, model, **kwargs)
        self.synchronize()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize()
        output = super().validation_step(*args, **kwargs)
        self.synchronize()
        return output

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize()
        output = super().test_step(*args, **kwargs)
        self.synchronize()
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath, storage_options: Any = None) -> None:
        self.synchronize()
        if self.is_global_zero:
            checkpoint = apply_to_collection(checkpoint, Tensor, Tensor.cpu)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class SingleCoreStrategy(XLAExecution, SingleDeviceStrategy):
    """Trains on one NeuronCore."""

    strategy_name = "neuron_single_core"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(device=xla_device(), **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # What is asked for here is read at once, and a comparison on the device would be a graph to compile.
        return tensor.cpu() if isinstance(tensor, torch.Tensor) else tensor
