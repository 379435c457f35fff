"""`ssm-trn fit | validate | test`: Lightning's command line in subclass mode, with one folder a run."""

import logging
import os
import shutil
import signal
import warnings
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from ssm_trn.accelerators import CompileWatch, flavour, process_settings, trainer_settings
from ssm_trn.runtime import set_up_process
from ssm_trn.training.callbacks import Throughput, TrainingProgressBar
from ssm_trn.training.checkpoints import (
    StepCheckpoint,
    WholeFileCheckpoints,
    checkpoint_folder,
    last_checkpoint,
    newest_other,
)
from ssm_trn.training.faults import StopOnSignal
from ssm_trn.training.metrics_file import MetricsFile
from ssm_trn.training.run_folder import ConfigFile, RunFolder


class TrainingCommandLine(LightningCLI):
    """`--run_folder` alone says where logs, checkpoints and the exported model go.

    `--ckpt_path last` continues the run in that folder, or begins it if there is none, so that a job which is started
    again after an interruption always has the same command. The checkpoint gives weights, optimizer state, generators
    and position; every setting comes from the configuration and the command line. Those that decide the numbers of a
    run must stay what they were in its folder; in a new folder another run may begin with its checkpoint.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_folder", type=str, default="", help="Folder of this run, such as runs/NAME.")
        parser.link_arguments("run_folder", "trainer.default_root_dir")
        parser.add_lightning_class_args(StepCheckpoint, "checkpoint")
        parser.link_arguments("run_folder", "checkpoint.dirpath", compute_fn=checkpoint_folder)
        parser.set_defaults(
            {
                "trainer.enable_model_summary": False,
                "checkpoint.every_n_train_steps": 100,
                "checkpoint.save_top_k": 0,
                "checkpoint.save_last": True,
                "checkpoint.enable_version_counter": False,
            }
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        commands = LightningCLI.subcommands()
        return {name: commands[name] | {"weights_only"} for name in ("fit", "validate", "test")}

    def _parse_ckpt_path(self) -> None:
        """Finds the checkpoint. Lightning's own version would let the hyperparameters saved in it win here."""
        command = self.config.subcommand
        folder, path = self.config[command].run_folder, self.config[command].ckpt_path
        last = last_checkpoint(folder)
        if not folder:
            raise ValueError("the run has no folder: name one with --run_folder, such as runs/NAME")
        present = os.path.exists(last)
        named = path not in (None, "last")
        if command == "fit" and present and (path is None or named and not _is_beside(path, last)):
            raise ValueError(
                f"{folder} holds a run already: continue it with --ckpt_path last, or choose another --run_folder"
            )
        if named and not os.path.exists(path):
            raise FileNotFoundError(f"there is no checkpoint {path}: give the path of one, or last")
        if not named and not present and (other := newest_other(last)):
            raise FileNotFoundError(f"{last} is gone: go on from the one before with --ckpt_path {other}")
        if not named and not present and command != "fit":
            raise FileNotFoundError(f"{folder} has no checkpoint yet: train it first with ssm-trn fit")
        if not named:
            path = last if present else None
        self._checkpoint = {"ckpt_path": path, "weights_only": True}

    def fit(self, **arguments: Any) -> None:
        """Trains. A run that fails before its first step leaves no folder behind."""
        folder = self._get(self.config, "run_folder")
        is_new = not os.path.exists(folder)
        try:
            self.trainer.fit(**arguments | self._checkpoint)
        except (Exception, SystemExit) as error:
            if is_new and self.trainer.global_step == 0 and self.trainer.is_global_zero:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error.__context__, KeyboardInterrupt):  # Lightning has made a SystemExit of it
                signal.signal(signal.SIGINT, signal.default_int_handler)  # which it had switched off
                raise KeyboardInterrupt from error
            raise

    def validate(self, **arguments: Any) -> None:
        self.trainer.validate(**arguments | self._checkpoint)

    def test(self, **arguments: Any) -> None:
        self.trainer.test(**arguments | self._checkpoint)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings, folder = self._get(self.config_init, "trainer"), self._get(self.config_init, "run_folder")
        _check_trainer(settings)
        callbacks = list(settings.callbacks or [])
        if settings.enable_progress_bar is not False:
            callbacks.append(TrainingProgressBar())
        logger: Any = False
        if self.subcommand != "fit":
            self.save_config_callback = None  # config.yaml tells how the run was trained
        elif not settings.fast_dev_run:
            callbacks += [Throughput(), RunFolder(folder), StopOnSignal()]
            logger = self._loggers(settings.logger, folder)
        on_device = trainer_settings(settings)
        if (
            on_device
            and flavour() != "native"
            and not any(isinstance(callback, CompileWatch) for callback in callbacks)
        ):
            callbacks.append(CompileWatch())
        on_device = on_device or process_settings(settings)
        plugins = [*(on_device.pop("plugins", settings.plugins) or []), WholeFileCheckpoints()]
        try:
            return super().instantiate_trainer(
                logger=logger, callbacks=callbacks, plugins=plugins, **on_device, **kwargs
            )
        except TypeError as error:  # how Lightning tells of some wrong settings
            raise ValueError(f"trainer: {error}") from error

    @staticmethod
    def _loggers(configured: Any, folder: str) -> list:
        """metrics.csv always; beside it what the config names, by default TensorBoard."""
        if configured in (None, True):
            configured = TensorBoardLogger(folder, name="", version="tensorboard")
        others = configured if isinstance(configured, list) else [configured]
        return [MetricsFile(folder), *(logger for logger in others if logger)]


def run(subcommand: str, words: list[str]) -> TrainingCommandLine:
    """Runs `ssm-trn SUBCOMMAND WORDS` and returns what ran, with its trainer and model."""
    set_up_process()
    _silence()
    return TrainingCommandLine(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        seed_everything_default=0,
        save_config_callback=ConfigFile,
        parser_kwargs={"prog": "ssm-trn", "exit_on_error": False}
        | {name: {"exit_on_error": False} for name in TrainingCommandLine.subcommands()},
        args=[subcommand, *words],
    )


def _is_beside(path: str, other: str) -> bool:
    return os.path.abspath(os.path.dirname(path)) == os.path.abspath(os.path.dirname(other))


def _check_trainer(settings: Any) -> None:
    """A ValueError for settings of the Trainer that it takes and then stumbles over, or that train nothing."""
    for name in ("max_steps", "max_epochs", "val_check_interval", "log_every_n_steps", "accumulate_grad_batches"):
        if settings.get(name) == 0:
            raise ValueError(f"trainer.{name} is 0; it must be above 0")
    if not (settings.gradient_clip_val or 0) >= 0:
        raise ValueError(f"trainer.gradient_clip_val is {settings.gradient_clip_val}; it must be at least 0")


def _silence() -> None:
    """Leaves out what the user can do nothing about."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*args parameter is intended to run from within Python.*",
        ".*does not have many workers.*",
        ".*your dataloader is not resumable.*",  # what it yields depends on the step alone
        ".*The dirpath has changed.*",  # a checkpoint of another run was asked for
        ".*recommended to use `self.log.*sync_dist=True.*",  # what is logged at the end of an epoch is reduced already
        ".*LeafSpec.* is deprecated.*",
        ".*FSDP2-wrapped module .* returned a view tensor.*",  # the logits without padding, which nobody writes to
        ".*`max_epochs` was not set.*",  # what ends a training is max_steps
        ".*The number of training batches .* is smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", message)
