"""The folder of a run: config.yaml, metrics.csv, checkpoints/last.ckpt, and after the training the exported model."""

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from ssm_trn.data.token_file import META_FILE, TOKENIZER_FILE
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.files import replacing
from ssm_trn.interop.tokenizer import export_tokenizer
from ssm_trn.training.metrics_file import MetricsFile

_NEEDED = {"pytorch-lightning_version", "global_step", "state_dict"}
_NO_CHECKPOINT = "{} is not a checkpoint of a training, or a damaged one: name another with --ckpt_path, or remove it"


def checkpoint_folder(run_folder: str | Path) -> str:
    return os.path.join(run_folder, "checkpoints")


def last_checkpoint(run_folder: str | Path) -> str:
    return os.path.join(checkpoint_folder(run_folder), "last.ckpt")


class WholeFileCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint under another name first, so that a run killed meanwhile keeps the one before.

    Lightning writes to the temporary folder and moves; where that is another file system, the move is a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path, storage_options: Any = None) -> None:
        with replacing(path) as unfinished:
            super().save_checkpoint(checkpoint, unfinished, storage_options)

    def load_checkpoint(self, path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint. Raises ValueError if the file is no checkpoint, or a damaged one."""
        try:
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        except OSError:
            raise
        except Exception as error:  # what comes of foreign bytes is any error that a reader can have
            raise ValueError(_NO_CHECKPOINT.format(path)) from error
        if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _NEEDED:
            raise ValueError(_NO_CHECKPOINT.format(path))
        return checkpoint


class RunFolder(Callback):
    """Keeps a run's folder true to the run.

    At the start, metrics.csv loses the rows of steps that the checkpoint does not know: a killed run had got further
    than its last checkpoint and does those steps again. At the end the last checkpoint is that of the last step, and
    the model is written for use without Lightning: config.json, model.safetensors, tokenizer.model and meta.json, and
    the tokenizer once more for transformers.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin = f"continues after step {trainer.global_step}" if trainer.global_step else "begins"
        trainer.print(f"{self.folder}: {pl_module.model.parameter_count():,} parameters; training {begin}")
        self._saved_step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.restart_after(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx) -> None:
        # Not left to on_train_end: there Lightning has closed the epoch, and training on from it would begin another.
        if trainer.global_step == trainer.max_steps:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved_step != trainer.global_step:  # stopped before max_steps
            self._save(trainer)
        self._export(pl_module, Path(trainer.datamodule.folder))
        trainer.print(f"{self.folder}: trained to step {trainer.global_step}")

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(last_checkpoint(self.folder))
        self._saved_step = trainer.global_step

    @rank_zero_only
    def _export(self, module: LightningModule, data_folder: Path) -> None:
        module.model.save_pretrained(self.folder)
        for name in (TOKENIZER_FILE, META_FILE):
            with replacing(self.folder / name) as unfinished:
                shutil.copyfile(data_folder / name, unfinished)
        export_tokenizer(Tokenizer.load(self.folder / TOKENIZER_FILE), self.folder)
