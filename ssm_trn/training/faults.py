"""What ends a training before its time: a signal of the cluster, and gradients that are not finite."""

import signal
import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ssm_trn.training.checkpoints import StepCheckpoint

# EX_TEMPFAIL of sysexits.h, "try again later": of a run that was told to stop, and saved. A job script requeues on it.
STOPPED = 75
_SHOWN = 64


class StoppedBySignal(SystemExit):
    """The end of a training that was told to stop and can go on."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class StopOnSignal(Callback):
    """On SIGTERM or SIGUSR1, saves at the end of the running step and ends the program with status 75.

    SLURM sends SIGTERM before it takes a machine away, and `#SBATCH --signal=USR1@120` has it send the other one two
    minutes before. Of several processes each may be told at another step, or only one of them: they ask one another at
    the steps that are logged, when they wait for their devices anyway.

    Lightning's own handler, which this one replaces, starts a collective operation in the middle of whatever the
    process is doing, and ends it with status 0.
    """

    def __init__(self) -> None:
        self._told = False
        self._step = -1

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._step:  # in the middle of a step that takes several batches
            return
        self._step = step
        told = self._told
        if trainer.world_size > 1:
            asked = step % trainer.log_every_n_steps == 0
            told = asked and trainer.strategy.reduce_boolean_decision(told, all=False)
        if told:
            self._stop(trainer)

    def _listen(self, trainer: Trainer) -> None:
        self._told |= trainer.received_sigterm  # by Lightning's handler, which it has installed just before
        for number in (signal.SIGTERM, signal.SIGUSR1):  # Lightning gives them back to who had them
            signal.signal(number, self._tell)

    def _tell(self, *_: Any) -> None:
        self._told = True

    def _stop(self, trainer: Trainer) -> None:
        saver = next(callback for callback in trainer.callbacks if isinstance(callback, StepCheckpoint))
        how = "before the first step; the same command begins anew"
        if trainer.global_step:
            saver.save_now(trainer)
            how = f"after step {trainer.global_step}; the same command goes on from there, with --ckpt_path last"
        if trainer.is_global_zero:
            print(f"ssm-trn: told to stop {how}", file=sys.stderr)
        raise StoppedBySignal


class FiniteUpdates:
    """Keeps gradients that are not finite from the weights and the optimizer.

    On a CPU such a step changes nothing at all. Elsewhere each step would have to wait for the device to learn of it:
    there the step goes on with a gradient of zero, and `read`, to be called where a wait costs nothing, tells of it.
    The norm decides, which is that of all processes, so they all do the same.

    Args:
        skip: whether to count such steps in `skipped`, rather than to raise at the first of them.
    """

    def __init__(self, skip: bool):
        self.skip, self.skipped = skip, 0
        self._unread: list[tuple[int, Tensor]] = []

    def check(self, parameters: list[nn.Parameter], norm: Tensor, trainer: Trainer) -> None:
        """Takes the gradients away from the optimizer if `norm`, their norm over all parameters, is not finite."""
        finite = norm.isfinite()
        self._unread.append((trainer.global_step, finite))
        if self._is_known(finite):
            self.read(trainer)
            for parameter in parameters if not finite else ():
                parameter.grad = None  # AdamW passes over it: no step, no decay
        else:
            for parameter in parameters:
                gradient = parameter.grad
                getattr(gradient, "to_local", lambda own=gradient: own)().masked_fill_(~finite, 0)

    @staticmethod
    def _is_known(tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def read(self, trainer: Trainer) -> None:
        """Counts the steps since the last call that were not finite, or raises ValueError for the first of them."""
        unread, self._unread = self._unread, []
        for step, finite in unread:
            if not finite:
                if not self.skip:
                    raise ValueError(_not_finite(step, trainer))
                self.skipped += 1


def _not_finite(step: int, trainer: Trainer) -> str:
    """What there is to know of a step, counted from 0, whose loss or gradient is not finite."""
    last = getattr(trainer.checkpoint_callback, "last_model_path", "") or trainer.ckpt_path
    good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return (
        f"the loss or a gradient of step {step + 1} is not finite{_blocks(step, trainer)}, the weights have been kept "
        f"from it, and {good}: lower model.init_args.learning_rate, or leave such batches out with "
        "--model.init_args.skip_nonfinite_batches true"
    )


def _blocks(step: int, trainer: Trainer) -> str:
    """Which blocks of the data a step takes, as a part of a sentence; empty if the data does not tell."""
    blocks_of = getattr(trainer.datamodule, "blocks_of", None)
    if blocks_of is None:
        return ""
    batches = range(step * trainer.accumulate_grad_batches, (step + 1) * trainer.accumulate_grad_batches)
    blocks = [str(block) for batch in batches for block in blocks_of(batch)]
    more = f" and {len(blocks) - _SHOWN} more" if len(blocks) > _SHOWN else ""
    return f", its batch holds the blocks {', '.join(blocks[:_SHOWN])}{more}"
