"""The checkpoints of a run: when they are written, and how, so that a run killed at any instant keeps a whole one."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ssm_trn.files import replacing

_NEEDED = {"pytorch-lightning_version", "global_step", "state_dict"}


def checkpoint_folder(run_folder: str | Path) -> str:
    return os.path.join(run_folder, "checkpoints")


def last_checkpoint(run_folder: str | Path) -> str:
    return os.path.join(checkpoint_folder(run_folder), "last.ckpt")


def newest_other(path: str | Path) -> str | None:
    """The newest checkpoint beside one."""
    others = [other for other in Path(path).parent.glob("*.ckpt") if other != Path(path)]
    return str(max(others, key=lambda other: other.stat().st_mtime)) if others else None


class WholeFileCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint under another name first, so that a run killed meanwhile keeps the one before.

    Lightning writes to the temporary folder and moves; where that is another file system, the move is a copy. And it
    makes the whole file in memory first. The last.ckpt that is replaced stays as previous.ckpt, for the day when a disk
    loses the newer one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
            if path.name == "last.ckpt" and path.exists():
                _keep_as(path.with_name("previous.ckpt"), path)

    def load_checkpoint(self, path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint, of which nothing is executed.

        Raises ValueError if the file is no checkpoint, or a damaged one.
        """
        try:
            checkpoint = super().load_checkpoint(path, *args, **kwargs | {"weights_only": True})
        except OSError:
            raise
        except Exception as error:  # what comes of foreign bytes is any error that a reader can have
            raise ValueError(_damaged(path)) from error
        if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _NEEDED:
            raise ValueError(_damaged(path))
        return checkpoint


def _damaged(path: str | Path) -> str:
    other = newest_other(path)
    mend = f"go on from the one before with --ckpt_path {other}" if other else "or remove it and begin anew"
    return f"{path} is not a checkpoint of a training, or a damaged one: name another with --ckpt_path, {mend}"


def _keep_as(other: Path, path: Path) -> None:
    """Gives a file a second name, by a link, which takes no time; a file system without links goes without."""
    with suppress(OSError), replacing(other) as unfinished:
        unfinished.unlink(missing_ok=True)
        os.link(path, unfinished)


class StepCheckpoint(ModelCheckpoint):
    """Saves when a step is over: its row in metrics.csv is written, and the validation that follows it is done.

    Lightning saves before both, and a run killed in between would never make up for them. At the end of a training
    last.ckpt comes after everything else, so that a run which has it needs nothing more.
    """

    _ended: tuple | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        if trainer.global_step > self._step:  # gradients of a step that is not over yet are in no checkpoint
            self._step, self._ended = trainer.global_step, (trainer, pl_module, *batch)

    def on_train_batch_start(self, *args: Any) -> None:
        self._save_ended()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_ended()
        self.save_now(trainer)

    def save_now(self, trainer: Trainer) -> None:
        """Brings last.ckpt to the step that is done."""
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes back what Lightning has counted of the batch that is to come, and of an epoch that has no end."""
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for progress in (batches["total"], batches["current"]):
            if progress["started"] == progress["completed"] < progress["ready"]:
                progress["ready"], batches["is_last_batch"] = progress["completed"], False
        if not batches["is_last_batch"]:
            epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
            for progress in (epochs["total"], epochs["current"]):
                progress["processed"] = progress["completed"] = progress["started"] - 1

    def _save_ended(self) -> None:
        if self._ended is not None:
            ended, self._ended = self._ended, None
            super().on_train_batch_end(*ended)
