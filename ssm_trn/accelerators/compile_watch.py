"""Watches that a training on XLA devices compiles a few graphs at its start and none after."""

import logging
import sys
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

logger = logging.getLogger(__name__)
_READ = "aten::_local_scalar_dense"


class Counters(NamedTuple):
    """What torch-xla has counted in this process."""

    compilations: int
    executions: int
    reads: int  # of a single value by Python, for each of which everything waits
    fallbacks: tuple[str, ...]  # operations that ran on the CPU, as XLA has no form of them

    @classmethod
    def now(cls) -> "Counters":
        if "torch_xla" not in sys.modules:  # a CPU or a GPU trains
            return cls(0, 0, 0, ())
        from torch_xla.debug import metrics

        executions = metrics.metric_data("ExecuteTime")
        return cls(
            compilations=metrics.counter_value("UncachedCompile") or 0,
            executions=executions[0] if executions else 0,
            reads=metrics.counter_value(_READ) or 0,
            fallbacks=tuple(sorted(set(metrics.executed_fallback_ops()) - {_READ})),
        )


class CompileWatch(Callback):
    """Tells of every graph that is compiled after the first steps, with the batch and the cause.

    On a NeuronCore a compilation takes minutes, in which nothing trains. The first steps need some: the first, when
    there is no optimizer state yet, and another one later; where gradients are accumulated, a first and a further
    micro-batch. So do the first validation, checkpoint and log. After these the number stays, if all batches have the
    same shapes.

    Args:
        warmup_steps: optimizer steps of the process that may compile.
        fail: whether to stop the training with a ValueError rather than to warn.
    """

    def __init__(self, warmup_steps: int = 4, fail: bool = False):
        self.warmup_steps, self.fail = warmup_steps, fail

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._shapes: dict[str, dict[str, str]] = {}  # of the last batch of each stage
        self._special_rate = False
        self._happened: set[str] = set()  # kinds of events between two training batches
        self._events: set[str] = set()  # the same, since the last training batch
        self._told_fallbacks = False
        self._compilations = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warm_step = trainer.global_step + self.warmup_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        new = self._new_compilations()
        if new and trainer.global_step > self._warm_step and self._events <= self._happened:
            cause = f"{' or '.join(sorted(self._events)) or 'something else'} between two steps asked for it"
            self._tell(trainer, new, f"before training batch {batch_idx}", cause)
        self._happened |= self._events
        self._events.clear()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch: Any, batch_idx) -> None:
        new = self._new_compilations()
        cause = self._changed_shapes("training", batch) or self._changed_rate(trainer)
        if new and trainer.global_step > self._warm_step:
            self._tell(trainer, new, f"in training batch {batch_idx}", cause)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._events.add("a log")

    def on_validation_batch_start(self, trainer: Trainer, pl_module, batch: Any, batch_idx: int, *_: int) -> None:
        self._new_compilations()

    def on_validation_batch_end(self, trainer: Trainer, pl_module, outputs, batch: Any, batch_idx: int, *_) -> None:
        new = self._new_compilations()
        is_first = "validation" not in self._shapes
        cause = self._changed_shapes("validation", batch)
        if new and not is_first:
            self._tell(trainer, new, f"in validation batch {batch_idx}", cause)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._events.add("a validation")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._events.add("a checkpoint")

    def _new_compilations(self) -> int:
        """Since it was asked last. What has no XLA form is told of by the way."""
        now, before = Counters.now(), self._compilations
        if now.fallbacks and not self._told_fallbacks:
            self._told_fallbacks = True
            logger.warning("XLA has no form of %s: it runs on the CPU, at every step", ", ".join(now.fallbacks))
        self._compilations = now.compilations
        return now.compilations - before

    def _changed_shapes(self, stage: str, batch: dict[str, Tensor]) -> str:
        """How this batch differs from the one before of its stage; empty if it does not, or if there was none."""
        shapes = {name: f"{x.dtype} {list(x.shape)}".removeprefix("torch.") for name, x in batch.items()}
        before, self._shapes[stage] = self._shapes.get(stage, shapes), shapes
        changed = [name for name in before | shapes if before.get(name) != shapes.get(name)]
        return ", ".join(f"{name} is {shapes.get(name)} and was {before.get(name)} before" for name in changed)

    def _changed_rate(self, trainer: Trainer) -> str:
        """Whether the learning rate became, or ceased to be, one of the two numbers that XLA builds into a graph."""
        rates = {group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups}
        before, self._special_rate = self._special_rate, bool(rates & {0, 1})
        if before == self._special_rate:
            return ""
        return f"the learning rate is {min(rates)}, and 0 and 1 are built into the graph where others are inputs"

    def _tell(self, trainer: Trainer, new: int, where: str, cause: str) -> None:
        cause = cause or "all its shapes are as before; PT_XLA_DEBUG_LEVEL=2 prints the line of code that asked for it"
        message = f"{new} new graph{'s' * (new > 1)} compiled {where}, after the warm-up: {cause}"
        if self.fail:
            raise ValueError(message)
        if trainer.is_global_zero:
            logger.warning(message)
