"""Synthetic tasks x models x learning rates x seeds, each a training by `ssm-trn fit`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ssm_trn.bench.model import state_bytes
from ssm_trn.claims.experiment import Job, Row, fingerprint
from ssm_trn.config import ModelConfig
from ssm_trn.data import synthetic
from ssm_trn.evaluation.jobs import metrics, train_run
from ssm_trn.model import LanguageModel
from ssm_trn.runtime import available_device
from ssm_trn.training.accuracy import accuracies, accuracy_counts

_TEST_TOKENS = 2**16  # of a batch, which bounds the memory of long rows


@dataclass(frozen=True)
class Task:
    """A synthetic task and how models are trained and tested on it.

    Attributes:
        task: name of it, see docs/synthetic/README.md.
        options: of the training.
        steps: of the optimizer, at most.
        tests: settings to test in, each the options in which it differs from the training; the first is validated in.
        batch_size: rows of a step.
        train_rows: so many rows, again and again; None: new ones in each step.
        test_rows: that each accuracy is of.
        stop_at: accuracy in validation after which the training ends; None: never.
        validate_every: steps.
        in_reduced: whether the reduced grid has it.
    """

    task: str
    options: dict[str, Any]
    steps: int
    tests: Sequence[dict[str, Any]] = ({},)
    batch_size: int = 64
    train_rows: int | None = None
    test_rows: int = 512
    stop_at: float | None = 0.995
    validate_every: int = 50
    in_reduced: bool = True


@dataclass(frozen=True)
class _Trial:
    """A training: of a model on a task with a learning rate (None: the best of those that were tried) and a seed."""

    task: str
    model: str
    rate: float | None
    seed: int


@dataclass(frozen=True)
class Grid:
    """An Experiment: each model trained on each task.

    Each learning rate is tried with the first seed; the best by accuracy in validation, of equals the one of fewest
    steps, is that of the other seeds. Rows have the columns task, model, learning_rate, tried, steps,
    parameters, state_bytes (behind a row of the test), validation (accuracy), test, accuracy (of steps),
    sequence_accuracy (of whole rows) and cpu_seconds (of the training).

    Attributes:
        tasks: by name.
        models: by name, fields of a ModelConfig but vocab_size.
        learning_rates: to try.
        seeds: of weights and data.
        init_args: of the LanguageModelModule.
        trainer: settings of the Trainer.
    """

    tasks: Mapping[str, Task]
    models: Mapping[str, dict[str, Any]]
    learning_rates: Sequence[float]
    seeds: Sequence[int] = (0, 1, 2)
    init_args: dict[str, Any] = field(default_factory=lambda: {"warmup_steps": 50, "weight_decay": 0.1})
    trainer: dict[str, Any] = field(default_factory=lambda: {"accelerator": "cpu"})
    chosen: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by task and model: not tried again

    def jobs(self) -> list[Job]:
        return list(self._trials())

    def _trials(self) -> dict[Job, _Trial]:
        cells = [(task, model) for task in self.tasks for model in self.models]
        tries = [
            _Trial(*cell, rate, self.seeds[0])
            for cell in cells
            for rate in ([self.chosen[cell]] if cell in self.chosen else self.learning_rates)
        ]
        later = [_Trial(*cell, self.chosen.get(cell), seed) for seed in self.seeds[1:] for cell in cells]
        return {
            Job(_name(trial), trial.seed, self._fingerprint(trial), tries=trial in tries): trial
            for trial in tries + later
        }

    def run(self, job: Job, folder: Path, rows: Sequence[Row]) -> list[Row]:
        trial = self._trials()[job]
        rate = trial.rate or self._best_rates(rows)[trial.task, trial.model]
        task, config = self.tasks[trial.task], self._config(trial)
        before = time.process_time()
        train_run(folder, self._settings(trial, rate, folder), config.parameter_count())
        seconds = time.process_time() - before
        model = LanguageModel.from_pretrained(folder).to(available_device()).eval()
        common = {
            "task": trial.task,
            "model": trial.model,
            "learning_rate": f"{rate:g}",
            "tried": "yes" if job.tries else "no",
            "steps": str(max(int(row["step"]) for row in metrics(folder) if row.get("step"))),
            "parameters": str(config.parameter_count()),
        }
        base = synthetic.make(task.task, **task.options)
        validation = test_accuracies(model, base, "validation", task.test_rows)[0]
        found = []
        for change in task.tests:
            setting = base.changed(**change)
            accuracy, whole = test_accuracies(model, setting, "test", task.test_rows)
            steps = setting.batch("test", 0, 1)["tokens"].shape[1]
            found.append(
                common
                | {
                    "state_bytes": str(state_bytes(model, steps)),
                    "validation": f"{validation:.4f}",
                    "test": " ".join(f"{name} {value}" for name, value in (change or task.options).items()),
                    "accuracy": f"{accuracy:.4f}",
                    "sequence_accuracy": f"{whole:.4f}",
                    "cpu_seconds": f"{seconds:.1f}",
                }
            )
        return found

    def compared(self, rows: Sequence[Row]) -> list[Row]:
        best = self._best_rates(rows)
        return [row for row in rows if float(row["learning_rate"]) == best.get((row["task"], row["model"]))]

    def narrowed(self, rows: Sequence[Row], seeds: Sequence[int] | None, reduced: bool) -> "Grid":
        tasks = {name: task for name, task in self.tasks.items() if task.in_reduced or not reduced}
        chosen = self._best_rates(rows) if reduced or seeds else {}
        return replace(self, tasks=tasks, seeds=seeds or self.seeds[: 1 if reduced else None], chosen=chosen)

    def _best_rates(self, rows: Sequence[Row]) -> dict[tuple[str, str], float]:
        best: dict[tuple[str, str], tuple[float, int, float]] = {}
        for row in rows:
            if row["tried"] == "yes":
                cell, rate = (row["task"], row["model"]), float(row["learning_rate"])
                found = (-float(row["validation"]), int(row["steps"]), rate)
                best[cell] = min(best.get(cell, found), found)
        return {cell: rate for cell, (_, _, rate) in best.items()}

    def _config(self, trial: _Trial) -> ModelConfig:
        task = self.tasks[trial.task]
        base = synthetic.make(task.task, **task.options)
        vocab_size = max(base.changed(**change).vocab_size for change in task.tests)
        return ModelConfig.from_dict({**self.models[trial.model], "vocab_size": vocab_size})

    def _fingerprint(self, trial: _Trial) -> str:
        task = self.tasks[trial.task]
        return fingerprint([self._settings(trial, trial.rate, Path()), task.tests, task.test_rows])

    def _settings(self, trial: _Trial, rate: float | None, folder: Path) -> dict[str, Any]:
        """The configuration of `ssm-trn fit`."""
        task = self.tasks[trial.task]
        ending = {
            "class_path": "lightning.pytorch.callbacks.EarlyStopping",
            "init_args": {
                "monitor": "validation/accuracy",
                "mode": "max",
                "stopping_threshold": task.stop_at,
                "patience": task.steps,
            },
        }
        return {
            "seed_everything": trial.seed,
            "run_folder": str(folder),
            "model": {
                "class_path": "ssm_trn.training.LanguageModelModule",
                "init_args": {
                    "config": self._config(trial).to_dict(),
                    "learning_rate": rate,
                    "skip_nonfinite_batches": True,  # a learning rate that is too high loses and ends nothing
                    **self.init_args,
                },
            },
            "data": {
                "class_path": "ssm_trn.data.synthetic.SyntheticDataModule",
                "init_args": {
                    "task": task.task,
                    "options": task.options,
                    "batch_size": task.batch_size,
                    "train_rows": task.train_rows,
                    "seed": trial.seed,
                },
            },
            "trainer": {
                "max_steps": task.steps,
                "gradient_clip_val": 1.0,
                "log_every_n_steps": min(50, task.steps),
                "val_check_interval": min(task.validate_every, task.steps),
                "check_val_every_n_epoch": None,
                "num_sanity_val_steps": 0,
                "enable_progress_bar": False,
                "logger": False,
                "callbacks": [] if task.stop_at is None else [ending],
                **self.trainer,
            },
        }


def _name(trial: _Trial) -> str:
    rate = "" if trial.rate is None else f"-lr{trial.rate:g}"
    return f"{trial.task}-{trial.model}{rate}-seed{trial.seed}".replace(" ", "_")


@torch.inference_mode()
def test_accuracies(model: LanguageModel, task: synthetic.Task, split: str, rows: int) -> tuple[float, float]:
    """Of the rows of a split the share of scored steps that are right, and of rows that are right throughout."""
    device = next(model.parameters()).device
    steps = task.batch(split, 0, 1)["tokens"].shape[1]
    batch_size = max(1, min(rows, _TEST_TOKENS // steps))
    total = torch.zeros(4)
    for step in range(-(-rows // batch_size)):
        batch = {name: values.to(device) for name, values in task.batch(split, step, batch_size).items()}
        logits, _ = model(batch["tokens"], reset=batch["reset"])
        part = torch.ones(batch_size, 1, dtype=torch.bool, device=device)
        total += accuracy_counts(logits, batch | {"part": part}).cpu()
    found = dict(accuracies(total.tolist(), [""]))
    return found["accuracy"], found["sequence_accuracy"]
