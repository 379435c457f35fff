"""The folder of a run: config.yaml, metrics.csv, checkpoints/last.ckpt, and after the training the exported model."""

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only

from ssm_trn.data.token_file import META_FILE, TOKENIZER_FILE
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.files import remove_unfinished, replacing, write_whole
from ssm_trn.interop.tokenizer import export_tokenizer
from ssm_trn.training.checkpoints import checkpoint_folder
from ssm_trn.training.metrics_file import MetricsFile


class ConfigFile(SaveConfigCallback):
    """Writes config.yaml when the training begins: all has been checked by then, and what was there may be replaced."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning would write it here."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / self.config_filename
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.parser.dump(self.config, skip_none=False))


class RunFolder(Callback):
    """Keeps a run's folder true to the run.

    At the start, metrics.csv loses the rows of steps that the checkpoint does not know: a killed run had got further
    than its last checkpoint and does those steps again. At the end the model is written for use without Lightning:
    tokenizer.model and meta.json, the tokenizer once more for transformers, config.json and, last of all,
    model.safetensors, which says that the training is over.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin = f"continues after step {trainer.global_step}" if trainer.global_step else "begins"
        trainer.print(f"{self.folder}: {pl_module.model.parameter_count():,} parameters; training {begin}")
        if trainer.is_global_zero:
            remove_unfinished(self.folder)
            remove_unfinished(checkpoint_folder(self.folder))
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.restart_after(trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:  # the rows of the steps that the checkpoint knows are to last as long as it does
            logger.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = trainer.strategy.lightning_module_state_dict()  # of which processes may hold parts: all are asked
        self._export(pl_module, weights, getattr(trainer.datamodule, "folder", None))
        trainer.print(f"{self.folder}: trained to step {trainer.global_step}")

    @rank_zero_only
    def _export(self, module: LightningModule, weights: dict[str, Any], data_folder: str | None) -> None:
        if data_folder is not None:  # synthetic tasks have ids that stand for no text
            for name in (TOKENIZER_FILE, META_FILE):
                with replacing(self.folder / name) as unfinished:
                    shutil.copyfile(Path(data_folder) / name, unfinished)
            export_tokenizer(Tokenizer.load(self.folder / TOKENIZER_FILE), self.folder)
        module.model.save_pretrained(self.folder, {name.removeprefix("model."): weights[name] for name in weights})
