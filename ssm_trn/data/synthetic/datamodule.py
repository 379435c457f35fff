"""Training on a synthetic task, and its accuracy on rows that training has not seen, in any number of settings."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from ssm_trn.data.datamodule import Batch, Loader, SizedLoader, StepwiseDataModule, epoch_order, rows_of
from ssm_trn.data.synthetic import Task, make


class SyntheticDataModule(StepwiseDataModule):
    """Trains on one task and tests on it, in its own setting or in others (longer rows, more pairs).

    Of validation and test the module logs `accuracy`, the share of scored steps that are right, and
    `sequence_accuracy`, the share of rows whose scored steps all are; where there is more than one setting, of each, as
    in `accuracy/length_128`, and their means.
    """

    def __init__(
        self,
        task: str,
        options: dict[str, Any] | None = None,
        batch_size: int = 64,
        seed: int = 0,
        train_rows: int | None = None,
        validation: list[dict[str, Any]] | None = None,
        validation_batches: int = 4,
        test: list[dict[str, Any]] | None = None,
        test_batches: int = 16,
        num_workers: int = 0,
    ) -> None:
        """
        Args:
            task: Its name; docs/synthetic/README.md lists them.
            options: Of the task in training; those of its paper where none are given.
            batch_size: Rows of a batch over all devices together.
            seed: Decides the training rows; those of validation and test are the same for all seeds.
            train_rows: Train on so many rows, again and again in new orders; by default each step has new ones.
            validation: Settings to validate in, each as the options in which it differs, such as [{}, {length: 128}];
                by default that of training.
            validation_batches: Batches of validation in each setting.
            test: Settings to test in; by default those of validation.
            test_batches: Batches of the test in each setting.
            num_workers: Processes that make batches ahead of time; what is in them does not depend on it.
        """
        super().__init__()
        least = {"batch_size": (batch_size, 1), "seed": (seed, 0), "num_workers": (num_workers, 0)}
        least |= {"validation_batches": (validation_batches, 1), "test_batches": (test_batches, 1)}
        for name, (value, bound) in (least | {"train_rows": (train_rows or 1, 1)}).items():
            if value < bound:
                raise ValueError(f"{name} is {value}: it must be at least {bound}")
        self.name, self.task = task, make(task, **(options or {}))
        self.batch_size, self.seed, self.train_rows, self.num_workers = batch_size, seed, train_rows, num_workers
        settings = {"validation": validation or [{}], "test": test or validation or [{}]}
        self.settings = {split: _settings(self.task, changes) for split, changes in settings.items()}
        self.batches = {"validation": validation_batches, "test": test_batches}

    def setup(self, stage: str) -> None:
        """Raises ValueError if the model has too small a vocabulary for the task."""
        needed = max(task.vocab_size for tasks in (*self.settings.values(), {"": self.task}) for task in tasks.values())
        model = self.trainer.lightning_module.config.vocab_size
        if model < needed:
            raise ValueError(
                f"the task has a vocabulary of {needed}, the model one of {model}: "
                f"make model.init_args.config.vocab_size at least {needed}"
            )

    def parts(self, stage: str) -> list[str]:
        """The names of the settings that "validation" or "test" tells accuracies of, in the order of `part`."""
        return list(self.settings[stage])

    def training_batches(self, rank: int, world_size: int) -> Dataset[Batch]:
        rows = rows_of(rank, world_size, self.batch_size)
        if self.train_rows is None:
            return NewRows(self.task, self.batch_size, self.seed, rows)
        return SameRows(self.task.batch("train", 0, self.train_rows, self.seed), self.batch_size, self.seed, rows)

    def val_dataloader(self) -> Loader:
        return self._held_out("validation")

    def test_dataloader(self) -> Loader:
        return self._held_out("test")

    def _held_out(self, split: str) -> Loader:
        rows = rows_of(*self.rank(), self.batch_size)
        batches = HeldOutRows(list(self.settings[split].values()), split, self.batches[split], self.batch_size, rows)
        return SizedLoader(batches, lambda: range(len(batches)), self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """What decides the content of step s: a checkpoint is only resumed with the same."""
        options = {name: getattr(self.task, name) for name in self.task.options()}
        names = ("batch_size", "seed", "train_rows")
        return {"task": self.name, "options": options, **{name: getattr(self, name) for name in names}}


class NewRows(Dataset[Batch]):
    """Each step has rows of its own, drawn from (seed, step)."""

    def __init__(self, task: Task, batch_size: int, seed: int, rows: np.ndarray) -> None:
        self._task, self._batch_size, self._seed, self._rows = task, batch_size, seed, rows

    def __getitem__(self, step: int) -> Batch:
        return _part(self._task.batch("train", step, self._batch_size, self._seed), self._rows)


class SameRows(Dataset[Batch]):
    """The same rows in each epoch, in an order of its own; the epochs follow one another without an end."""

    def __init__(self, examples: Batch, batch_size: int, seed: int, rows: np.ndarray) -> None:
        self._examples, self._batch_size, self._seed, self._rows = examples, batch_size, seed, rows

    def __getitem__(self, step: int) -> Batch:
        places, examples = step * self._batch_size + self._rows, len(self._examples["tokens"])
        chosen = [epoch_order(self._seed, int(place // examples), examples)[place % examples] for place in places]
        return _part(self._examples, np.array(chosen))


class HeldOutRows(Dataset[Batch]):
    """Batches of a split in one setting after the other; `part`, bool [rows, settings], tells which one a row is of."""

    def __init__(self, tasks: list[Task], split: str, batches: int, batch_size: int, rows: np.ndarray) -> None:
        self._tasks, self._split, self._batches = tasks, split, batches
        self._batch_size, self._rows = batch_size, rows

    def __len__(self) -> int:
        return len(self._tasks) * self._batches

    def __getitem__(self, index: int) -> Batch:
        setting, step = divmod(index, self._batches)
        batch = _part(self._tasks[setting].batch(self._split, step, self._batch_size), self._rows)
        place = torch.full((len(self._rows),), setting)
        return batch | {"part": F.one_hot(place, len(self._tasks)).bool()}


def _part(batch: Batch, rows: np.ndarray) -> Batch:
    """Some rows of a batch."""
    return {name: values[rows] for name, values in batch.items()}


def _settings(task: Task, changes: list[dict[str, Any]]) -> dict[str, Task]:
    """The settings by names such as length_128_pairs_8."""
    settings = {}
    for change in changes:
        named = change or {"length": task.length}
        name = "_".join(f"{option}_{value}" for option, value in named.items())
        if name in settings:
            raise ValueError(f"the setting {name} is there twice: leave one out")
        settings[name] = task.changed(**change)
    return settings
