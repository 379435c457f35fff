"""`ssm-trn compare STUDY.yaml`: models of the same size, trained on the same tokens in the same order, then compared.

What is trained or evaluated is not done again: a comparison that was stopped goes on in the middle of the run where it
was stopped. Its trainings are numbered jobs, so that many machines can share them.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ssm_trn.bench.model import generation_timings, state_bytes, training_timings
from ssm_trn.data import TokenFile
from ssm_trn.data.datamodule import TrainingBatches
from ssm_trn.data.prepare import prepare
from ssm_trn.data.token_file import file_sha256
from ssm_trn.evaluation import page, report, scoring
from ssm_trn.evaluation.evaluate import BITS_PER_BYTE, EVALUATION_FILE, evaluate, quiet
from ssm_trn.evaluation.jobs import (
    EXPERIMENT_FILE,
    alone_in,
    best_learning_rate,
    experiment,
    metrics,
    overview,
    train,
    validation_loss,
)
from ssm_trn.evaluation.positions import loss_by_position
from ssm_trn.evaluation.study import Job, Study, Variant
from ssm_trn.evaluation.tasks import load_tasks
from ssm_trn.model import WEIGHTS_FILE, LanguageModel
from ssm_trn.results import FORMAT_VERSION, RESULTS_FILE, machine_facts, read_results, write_results

PACKAGES = ("torch", "lightning", "lm_eval", "datasets", "sentencepiece", "numpy")
_TIMING_ROUNDS = 5
_NEW_TOKENS = 32  # that decoding is timed over


def compare(
    study: str,
    output: str | None = None,
    benchmarks: str | None = None,
    job: int | None = None,
    list_jobs: bool = False,
    launcher: str | None = None,
    only_report: bool = False,
) -> dict[str, Any] | None:
    """Trains, evaluates and times the models of a study and writes results and report.

    The folder gets results.json, results.csv with a row for each run, report.md and a report.html that needs no other
    file.

    Args:
        study: YAML file with title, models, baseline, prepare, fit and output, and more that is optional;
            experiments/compare_quick.yaml explains each.
        output: Folder of the runs and the report; the study's own by default.
        benchmarks: Folder of benchmark files for official tasks among the study's.
        job: Do only the training of this number, with its evaluation; the last call, without it, does what is left.
        list_jobs: Only list the jobs with their numbers.
        launcher: Words that start each training in processes of its own, such as "torchrun --nproc_per_node=32".
        only_report: Write the report anew from results.json, without running anything.

    Returns:
        What results.json holds; nothing of a single job or a list.
    """
    plan = Study.read(study)
    folder = Path(output or plan.output)
    if only_report:
        return _report_anew(folder)
    comparison = Comparison(plan, folder, benchmarks, launcher)
    if list_jobs:
        print(overview(plan, comparison.jobs, folder))
        return None
    if job is not None:
        comparison.run(comparison.job(job))
        return None
    results = comparison.results(shlex.join(["ssm-trn", "compare", study]))
    write_results(folder / RESULTS_FILE, results)
    _report(results, folder)
    return results


def _report(results: dict[str, Any], folder: Path) -> None:
    report.write_report(results, folder)
    page.write_page(results, folder)
    print(f"\n{report.table(results)}\n\n{folder / 'report.html'} and {folder / 'report.md'} have details and plots.")


def _report_anew(folder: Path) -> dict[str, Any]:
    path = folder / RESULTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: run ssm-trn compare without --only_report first")
    results = read_results(path, "models")
    try:
        _report(results, folder)
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(
            f"{path} lacks something that this release reports: run ssm-trn compare without --only_report"
        ) from error
    return results


class Comparison:
    """A study whose data is prepared, and the folder of its runs.

    Args:
        study: what is compared.
        folder: where runs and results go.
        benchmarks: folder of benchmark files.
        launcher: words that start a training in processes of its own.
    """

    def __init__(self, study: Study, folder: Path, benchmarks: str | None = None, launcher: str | None = None):
        self.study, self.folder, self.benchmarks, self.launcher = study, folder, benchmarks, launcher
        self.data = prepare(**study.prepare)
        with quiet("lm_eval"):  # a wrong task is told before the training
            load_tasks(study.tasks, data=study.prepare["output"], benchmarks=benchmarks)
        self.variants = study.variants(self.data["tokenizer"]["vocab_size"])
        self.jobs = study.jobs(self.variants)

    def job(self, number: int) -> Job:
        if not 0 <= number < len(self.jobs):
            raise ValueError(f"there is no job {number}: the study has those from 0 to {len(self.jobs) - 1}")
        return self.jobs[number]

    def run(self, job: Job) -> Path:
        """The folder of a job's run, trained, and evaluated if the run is one of those that are compared."""
        run = train(self.study, self.jobs, job, self.folder, self.launcher)
        if not job.tries:
            self._evaluate(run)
        return run

    def results(self, command: str) -> dict[str, Any]:
        """Does what is left of all jobs, and returns what results.json holds."""
        for job in self.jobs:
            self.run(job)
        compared = [self._compared(variant, seed) for seed in self.study.seeds for variant in self.variants]
        evaluations = {(job.variant.name, job.seed): self._evaluate(self.folder / job.run) for job in compared}
        measured = self._measure([job for job in compared if job.seed == self.study.seeds[0]])
        models = []
        for job in compared:
            name, evaluation = job.variant.name, evaluations[job.variant.name, job.seed]
            row = {**self._row(job, evaluation), **measured[name]}
            if job.variant.model != self.study.baseline:
                baseline = evaluations[self._baseline_of(job.variant).name, job.seed]
                blocks = (scoring.BlockScores.from_dict(of[BITS_PER_BYTE]["blocks"]) for of in (evaluation, baseline))
                row["difference"] = asdict(scoring.paired_bootstrap(*blocks))
            models.append(row)
        splits = self.data["splits"]["validation"]
        return {
            "format_version": FORMAT_VERSION,
            "command": command,
            "study": {
                **asdict(self.study),
                "batch_size": self.study.batch_size,
                "block_length": self.study.block_length,
            },
            "data": {
                "source": self.data["settings"]["source"]["name"],
                "vocab_size": self.data["tokenizer"]["vocab_size"],
                "held_out_bytes": splits["bytes"],
                "held_out_documents": splits["documents"],
            },
            "models": models,
            "learning_rates": self._tries(),
            "machine": machine_facts(),
            "versions": {name: version(name) for name in PACKAGES},
        }

    def _compared(self, variant: Variant, seed: int) -> Job:
        """The job of a model and a seed whose run is compared: with the model's learning rate."""
        fitting = [job for job in self.jobs if job.variant.name == variant.name and job.seed == seed]
        if trained := [job for job in fitting if not job.tries]:
            return trained[0]
        rate = best_learning_rate(self.jobs, variant, self.folder)
        return next(job for job in fitting if job.learning_rate == rate)

    def _baseline_of(self, variant: Variant) -> Variant:
        """The baseline in the size of a variant."""
        size = self.variants.index(variant) // len(self.study.models)
        in_size = self.variants[size * len(self.study.models) :][: len(self.study.models)]
        return next(of for of in in_size if of.model == self.study.baseline)

    def _evaluate(self, run: Path) -> dict[str, Any]:
        """What the evaluation of a run gives: now, or by an earlier call."""
        study, path = self.study, run / EVALUATION_FILE
        if (earlier := self._earlier_evaluation(run)) is None:
            print(f"{run}: evaluation", flush=True)
            with alone_in(run):
                evaluate(
                    str(run),
                    [BITS_PER_BYTE, *study.tasks],
                    benchmarks=self.benchmarks,
                    limit=study.task_limit,
                    batch_size=64,
                )
            return json.loads(path.read_text())
        return earlier

    def _earlier_evaluation(self, run: Path) -> dict[str, Any] | None:
        """An evaluation of the run's model in this study's setting that lacks nothing."""
        path = run / EVALUATION_FILE
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{path} is damaged: remove it, and the same command evaluates the run again")
        text = TokenFile.open(self.study.prepare["output"], "validation").sha256
        if not (run / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(f"{run} has lost its model: remove that folder, and it is trained anew")
        same = found.get("model_sha256") == file_sha256(run / WEIGHTS_FILE) and found.get("held_out_sha256") == text
        whole = BITS_PER_BYTE in found and set(self.study.tasks) <= found.get("tasks", {}).keys()
        return found if same and whole and found.get("limit") == self.study.task_limit else None

    def _row(self, job: Job, evaluation: dict[str, Any]) -> dict[str, Any]:
        """What is known of a trained model but its speed."""
        study, config, run = self.study, job.variant.config, self.folder / job.run
        settings = experiment(study, self.jobs, job, self.folder)["model"]["init_args"]
        validated = [row for row in metrics(run) if row.get("validation/bits_per_byte")]
        held_out = self.data["splits"]["validation"]["tokens"]
        return {
            "name": job.variant.name,
            "model": job.variant.model,
            "seed": job.seed,
            "settings": {name: settings[name] for name in [*study.init_args, "learning_rate"] if name in settings},
            "config": config.to_dict(),
            "parameters": config.parameter_count(),
            "flops_per_token": config.flops_per_token(study.block_length),
            "tokens": job.steps * study.tokens_per_step,
            "bits_per_byte": {end: evaluation[BITS_PER_BYTE][end] for end in ("value", "low", "high")},
            "tasks": {task: _main_metric(evaluation["tasks"][task]) for task in study.tasks},
            "learning_curve": {
                "held_out_tokens": min(held_out, self._validation_tokens(held_out)),
                "tokens": [int(row["step"]) * study.tokens_per_step for row in validated],
                "bits_per_byte": [float(row["validation/bits_per_byte"]) for row in validated],
            },
            "command": shlex.join(["ssm-trn", "fit", "--config", str(run / EXPERIMENT_FILE)]),
        }

    def _validation_tokens(self, held_out: int) -> int:
        """Tokens that a validation during the training looks at."""
        limit = self.study.trainer.get("limit_val_batches")  # a number of batches, or a share of all
        batches = 1.0 if limit is None else limit
        tokens = self.study.batch_size * self.study.block_length
        return batches * tokens if isinstance(batches, int) else int(batches * held_out)

    def _measure(self, jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
        """Speeds, all models side by side, states, and loss by position, of one run of each variant."""
        study = self.study
        models = {job.variant.name: LanguageModel.from_pretrained(self.folder / job.run) for job in jobs}
        length = study.position_length or study.block_length
        positions = {name: loss_by_position(of, study.prepare["output"], length) for name, of in models.items()}
        print("speeds, all models side by side", flush=True)
        generation = generation_timings(models, study.contexts, 3 * _TIMING_ROUNDS, _NEW_TOKENS)  # short: more rounds
        batch = TrainingBatches(
            TokenFile.open(study.prepare["output"], "train"), study.block_length, study.batch_size, study.seeds[0]
        )[0]
        training = training_timings(models, batch, _TIMING_ROUNDS)
        tokens = batch["tokens"].numel()
        contexts = study.contexts
        return {
            name: {
                "loss_by_position": positions[name],
                "training_tokens_per_second": tokens / training[name].seconds,
                "seconds_to_first_token": {str(c): generation[name, c][0].seconds for c in contexts},
                "decode_tokens_per_second": {str(c): _NEW_TOKENS / generation[name, c][1].seconds for c in contexts},
                "state_bytes": {str(c): state_bytes(model, c) for c in contexts},
            }
            for name, model in models.items()
        }

    def _tries(self) -> list[dict[str, Any]]:
        """The learning rates that were tried, and which served their models best."""
        return [
            {
                "name": job.variant.name,
                "learning_rate": job.learning_rate,
                "tokens": job.steps * self.study.tokens_per_step,
                "validation_loss": validation_loss(self.folder / job.run),
                "chosen": job.learning_rate == best_learning_rate(self.jobs, job.variant, self.folder),
            }
            for job in self.jobs
            if job.tries
        ]


def _main_metric(task: dict[str, Any]) -> dict[str, Any]:
    name, score = next(iter(task["metrics"].items()))
    return {"metric": name, "items": task["items"], **score}
