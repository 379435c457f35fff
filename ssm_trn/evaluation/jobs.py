"""The trainings of a study: each an ordinary run, OUTPUT/RUN, made by `ssm-trn fit` from the experiment.yaml in it.

What is trained is not trained again, and a training that was stopped goes on from its last checkpoint.
"""

import csv
import fcntl
import math
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ssm_trn.evaluation.study import Job, Study, Variant
from ssm_trn.files import read_yaml, write_whole
from ssm_trn.model import WEIGHTS_FILE
from ssm_trn.training.metrics_file import METRICS_FILE

EXPERIMENT_FILE = "experiment.yaml"


def is_trained(folder: Path, job: Job) -> bool:
    return (folder / job.run / WEIGHTS_FILE).exists()


def train(study: Study, jobs: Sequence[Job], job: Job, folder: Path, launcher: str | None = None) -> Path:
    """The run folder of a job, trained to its end: now, or by an earlier call.

    Args:
        study: whose job it is.
        jobs: all of the study, as this one may need the learning rate that others found.
        job: what to train.
        folder: of the runs.
        launcher: words before `-m ssm_trn fit ...`, such as "torchrun --nproc_per_node=32"; None: in this process.

    Raises:
        ValueError: if the run is there from another study, another process trains it, or the learning rate is not
            known yet.
    """
    run, settings = folder / job.run, experiment(study, jobs, job, folder)
    return train_run(run, settings, job.variant.config.parameter_count(), launcher)


def train_run(run: Path, settings: dict[str, Any], parameters: int, launcher: str | None = None) -> Path:
    """A run folder, trained to its end as `settings`, a configuration of `ssm-trn fit`, say.

    Raises:
        ValueError: if the run is there with other settings, or another process trains it.
    """
    file = run / EXPERIMENT_FILE
    if file.exists() and _but_folder(read_yaml(file)) != _but_folder(yaml.safe_load(yaml.safe_dump(settings))):
        raise ValueError(f"{run} holds a run of another study: choose another --output, or remove that folder")
    if (run / WEIGHTS_FILE).exists():
        return run
    run.mkdir(parents=True, exist_ok=True)
    with alone_in(run):
        write_whole(file, yaml.safe_dump(settings, sort_keys=False))
        print(f"{run}: training, {parameters:,} parameters", flush=True)
        try:
            _fit(["--config", str(file), "--ckpt_path", "last"], launcher)
        except Exception:
            if [*run.iterdir()] == [file]:  # nothing was trained: the mended study may use this folder
                file.unlink()
                os.removedirs(run)
            raise
    return run


def _but_folder(experiment: Any) -> Any:
    """Without its run folder, which may have another name, or have been moved, and hold the same run."""
    return {**experiment, "run_folder": None} if isinstance(experiment, dict) else experiment


@contextmanager
def alone_in(run: Path) -> Iterator[None]:
    """Holds a run's folder against other processes; the hold ends with the process."""
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(f"another process works in {run}: wait until it has ended") from error
    except OSError:  # some network file systems cannot
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def _fit(words: list[str], launcher: str | None) -> None:
    if not launcher:
        from ssm_trn.training.command_line import run

        run("fit", words)
        return
    command = [*shlex.split(launcher), "-m", "ssm_trn", "fit", *words]
    status = subprocess.run(command).returncode
    if status:
        raise ValueError(f"the training ended with status {status}: {shlex.join(command)}")


def experiment(study: Study, jobs: Sequence[Job], job: Job, folder: Path) -> dict[str, Any]:
    """The configuration of `ssm-trn fit` for a job."""
    rate = job.learning_rate or best_learning_rate(jobs, job.variant, folder)
    settings = {**study.init_args, **({} if rate is None else {"learning_rate": rate})}
    if job.tries:  # a learning rate that is too high loses, and does not end the study
        settings.setdefault("skip_nonfinite_batches", True)
    return {
        **study.fit,
        "seed_everything": job.seed,
        "run_folder": str(folder / job.run),
        "model": {
            "class_path": "ssm_trn.training.LanguageModelModule",
            "init_args": {"config": job.variant.config.to_dict(), **settings},
        },
        "data": {
            "class_path": "ssm_trn.data.TokenDataModule",
            "init_args": {**study.fit["data"]["init_args"], "folder": study.prepare["output"], "seed": job.seed},
        },
        "trainer": {**study.trainer, "max_steps": job.steps},
    }


def best_learning_rate(jobs: Sequence[Job], variant: Variant, folder: Path) -> float | None:
    """The learning rate with the lowest validation loss at the end; None if none was to be tried.

    A training that left batches out, as a loss or gradient was not finite, has lost, or whose last loss is no number.
    """
    tries = [job for job in jobs if job.variant.name == variant.name and job.tries]
    missing = [job.run for job in tries if not is_trained(folder, job)]
    if missing:
        numbers = ", ".join(str(jobs.index(job)) for job in tries if job.run in missing)
        raise ValueError(f"the learning rate of {variant.name} is not known yet: run job {numbers} first")
    losses = {}
    for job in tries:
        run, loss = folder / job.run, validation_loss(folder / job.run)
        losses[job.learning_rate] = (math.isnan(loss) or _skipped(run), loss)
    return min(losses, key=lambda rate: losses[rate], default=None)


def validation_loss(run: Path) -> float:
    """The last validation loss of a run, in nats per token."""
    values = [row["validation/loss"] for row in metrics(run) if row.get("validation/loss")]
    if not values:
        raise ValueError(f"{run} was never validated: make val_check_interval of the study's fit smaller")
    return float(values[-1])


def _skipped(run: Path) -> bool:
    """Whether the training of a run left batches out."""
    return any(float(row.get("skipped_batches") or 0) > 0 for row in metrics(run))


def metrics(run: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv."""
    with open(run / METRICS_FILE, newline="") as file:
        return list(csv.DictReader(file))


def overview(study: Study, jobs: Sequence[Job], folder: Path) -> str:
    """The jobs with their numbers, a line each."""
    lines = []
    unset = "the best learning rate" if any(job.tries for job in jobs) else "default learning rate"
    for number, job in enumerate(jobs):
        rate = unset if job.learning_rate is None else f"learning rate {job.learning_rate:g}"
        tokens = job.steps * study.tokens_per_step
        done = "done" if is_trained(folder, job) else "to do"
        lines.append(f"{number:4}  {done:5}  {job.run}: seed {job.seed}, {rate}, {tokens:,} tokens")
    return "\n".join(lines)
