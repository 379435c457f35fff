"""What is shown of a training while it runs: its speed and a progress bar."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from ssm_trn.training.metrics_file import MetricsFile


class Throughput(Callback):
    """Logs `tokens_per_second` of the training steps since it was logged last, without the time of validations.

    Args:
        warmup_steps: first steps of the process that are not counted (allocations, kernels compiled or tuned).
    """

    def __init__(self, warmup_steps: int = 5):
        self.warmup_steps = warmup_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = self._last_warmup_step = trainer.global_step + self.warmup_steps
        self._tokens, self._seconds = 0, 0.0
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx) -> None:
        now, step = time.perf_counter(), trainer.global_step
        if step > self._last_warmup_step:
            self._tokens += batch["tokens"].numel() * trainer.world_size
            self._seconds += now - self._since
        self._since = now
        if step % trainer.log_every_n_steps == 0 and step > self._logged_step:
            pl_module.log("tokens_per_second", torch.tensor(self._tokens / self._seconds))  # a tensor on the CPU
            self._tokens, self._seconds, self._logged_step = 0, 0.0, step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()


class TrainingProgressBar(RichProgressBar):
    """A progress bar that shows what was last logged, so that it never waits for the device."""

    SHOWN = {"train/loss": "loss", "validation/bits_per_byte": "bits/byte", "validation/accuracy": "accuracy"}
    SHOWN |= {"tokens_per_second": "tokens/s"}

    @property
    def total_train_batches(self) -> int | float:
        """All of the run's, not only those left after a resumption: the bar counts the done ones too."""
        steps = self.trainer.max_steps
        return steps * self.trainer.accumulate_grad_batches if steps > 0 else super().total_train_batches

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        latest = next((logger.latest for logger in trainer.loggers if isinstance(logger, MetricsFile)), {})
        return {label: latest[name] for name, label in self.SHOWN.items() if name in latest}

    def _get_train_description(self, current_epoch: int) -> str:
        return "Training"  # the row of batches has no end, so epochs say nothing
