"""What the tests of training on XLA devices put into a training: a witness of the graphs, and data of many shapes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch_xla.core.xla_model as xla_model
from lightning.pytorch import Callback

from ssm_trn.accelerators.compile_watch import Counters
from ssm_trn.data import TokenDataModule
from ssm_trn.training.command_line import TrainingCommandLine, run
from tests.training.tiny import metrics

LOGGED = ("train/loss", "gradient_norm", "validation/loss", "validation/bits_per_byte")


class Witness(Callback):
    """Keeps torch-xla's counters before and after each batch, without what is logged then; may fail in mid-run."""

    def __init__(self, fail_at: int = 0):
        self.fail_at, self.seen = fail_at, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._before = self._counted()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append((self._before, self._counted()))
        if self.fail_at and trainer.global_step == self.fail_at:
            raise RuntimeError("as the test wants it")

    @staticmethod
    def _counted() -> Counters:
        xla_model.wait_device_ops()  # executions are counted when they end
        return Counters.now()


class Ragged(TokenDataModule):
    """The batch of step 6 is shorter than the others."""

    def train_dataloader(self) -> Iterator:
        for number, batch in enumerate(super().train_dataloader(), start=1):
            yield {name: x[:, :-4] if number == 6 else x for name, x in batch.items()}


def fit(config: str, folder: Path, accelerator: str, *words: str, witness: str = "") -> TrainingCommandLine:
    if accelerator == "neuron":
        words += ("--trainer.callbacks+=tests.xla.training.Witness", *([witness] if witness else []))
    command = ["--config", config, "--run_folder", str(folder), "--trainer.accelerator", accelerator, *words]
    return run("fit", command)


def seen_by(command: TrainingCommandLine) -> list[tuple[Counters, Counters]]:
    return next(callback.seen for callback in command.trainer.callbacks if isinstance(callback, Witness))


def losses(folder: Path, names: Sequence[str] = LOGGED) -> list[tuple[str, str, float]]:
    """(step, name, value) of what a run logged under these names."""
    return [(row["step"], name, float(row[name])) for row in metrics(folder) for name in names if name in row]
