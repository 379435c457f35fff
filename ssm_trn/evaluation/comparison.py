"""`ssm-trn compare STUDY.yaml`: models of the same size, trained on the same tokens in the same order, then compared.

Each model and seed is an ordinary run, OUTPUT/NAME-seedN, made by `ssm-trn fit` from the experiment.yaml in it. What is
trained is not trained again: a comparison that was stopped goes on in the middle of the run where it was stopped.
"""

import csv
import os
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.data import TokenFile
from ssm_trn.data.datamodule import TrainingBatches
from ssm_trn.data.prepare import prepare
from ssm_trn.evaluation import report, scoring
from ssm_trn.evaluation.evaluate import BITS_PER_BYTE, evaluate, quiet
from ssm_trn.evaluation.speed import speeds
from ssm_trn.evaluation.tasks import load_tasks
from ssm_trn.matching import match_parameters
from ssm_trn.results import FORMAT_VERSION, RESULTS_FILE, machine_facts, read_results, write_results, write_whole


@dataclass(frozen=True)
class Study:
    """What a comparison compares.

    Args:
        title: heading of the report.
        models: by name, the fields of a ModelConfig or a YAML file with them; vocab_size comes from the data.
        baseline: the model that the others are compared with.
        parameters: the size that each model is brought to, by `match_parameters`; None: models as they are given.
        prepare: arguments of `ssm-trn prepare`.
        fit: a configuration of `ssm-trn fit` without the model's config, seeds and run folder; its parts may be YAML
            files. The paths of such files, and of models, are relative to the study's file.
        seeds: of the initial weights and of the order of the data; one run each.
        tasks: that `ssm-trn evaluate` knows.
        task_limit: items of each task; None: all.
        contexts: lengths at which decoding is timed.
        output: folder of the runs and the report.
    """

    title: str
    models: dict[str, Any]
    baseline: str
    prepare: dict[str, Any]
    fit: dict[str, Any]
    output: str
    parameters: int | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    tasks: list[str] = field(default_factory=list)
    task_limit: int | None = None
    contexts: list[int] = field(default_factory=lambda: [256, 2048])

    def __post_init__(self):
        if self.baseline not in self.models:
            raise ValueError(f"the baseline '{self.baseline}' is none of the models {', '.join(self.models)}")
        for keys in (
            ("data", "init_args", "batch_size"),
            ("data", "init_args", "block_length"),
            ("trainer", "max_steps"),
        ):
            if not _has(self.fit, keys):
                raise ValueError(f"the study's fit does not set {'.'.join(keys)}")
        for name, part in {
            **self.models,
            **{key: self.fit[key] for key in self.fit.keys() & {"model", "data"}},
        }.items():
            if not isinstance(part, dict):
                raise ValueError(f"the study's '{name}' is {part!r}, which should be a mapping or a YAML file with one")
        unknown = self.prepare.keys() - signature(prepare).parameters.keys()
        if unknown or "output" not in self.prepare:
            wrong = f"has '{min(unknown)}'" if unknown else "lacks 'output'"
            raise ValueError(f"the study's prepare {wrong}: give the arguments of ssm-trn prepare")
        limit = 1 if self.task_limit is None else self.task_limit
        if (
            min(1 if self.parameters is None else self.parameters, limit, *self.contexts) < 1
            or min(self.seeds, default=0) < 0
        ):
            raise ValueError("parameters, task_limit and contexts of a study must be at least 1, seeds at least 0")
        if not self.seeds or len(self.contexts) < 2:
            raise ValueError("a study needs at least one seed and two context lengths")
        for name in self.models:
            if "/" in name or name.startswith("."):
                raise ValueError(f"the model '{name}' cannot name a folder: use letters, digits and _")

    @property
    def batch_size(self) -> int:
        return self.fit["data"]["init_args"]["batch_size"]

    @property
    def block_length(self) -> int:
        return self.fit["data"]["init_args"]["block_length"]

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_length * self.fit["trainer"].get("accumulate_grad_batches", 1)

    @classmethod
    def read(cls, path: str) -> "Study":
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"there is no study {path}: give the path of a YAML file such as experiments/*.yaml"
            )
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
        values = parser.parse_path(path).as_dict()
        folder = Path(path).parent
        values["models"] = {name: _piece(folder, model) for name, model in values["models"].items()}
        values["fit"] = {name: _piece(folder, part) for name, part in values["fit"].items()}
        return cls(**values)


def _has(values: Any, keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _piece(folder: Path, value: str | dict[str, Any]) -> dict[str, Any]:
    """A part of a configuration: itself, or what the YAML file of that name holds."""
    if not isinstance(value, str):
        return value
    if not (folder / value).is_file():
        raise FileNotFoundError(f"the study names {value}, but there is no file {folder / value}")
    return yaml.safe_load((folder / value).read_text())


def compare(
    study: str, output: str | None = None, benchmarks: str | None = None, only_report: bool = False
) -> dict[str, Any]:
    """Trains, evaluates and times the models of a study and writes results.json, report.md and plots.

    Args:
        study: YAML file with title, models, baseline, prepare, fit and output, and perhaps parameters, seeds, tasks,
            task_limit and contexts; experiments/compare_quick.yaml explains each.
        output: folder of the runs and the report; the study's own by default.
        benchmarks: folder of benchmark files for official tasks among the study's.
        only_report: write report.md and the plots anew from results.json, without running anything.

    Returns:
        What results.json holds.
    """
    path, plan = study, Study.read(study)
    folder = Path(output or plan.output)
    if only_report:
        results = read_results(folder / RESULTS_FILE, "models")
    else:
        results = _run(path, plan, folder, benchmarks)
        write_results(folder / RESULTS_FILE, results)
    report.write_report(results, folder)
    print(f"\n{report.table(results)}\n\n{folder / 'report.md'} has the details and plots.")
    return results


def _run(path: str, study: Study, folder: Path, benchmarks: str | None) -> dict[str, Any]:
    meta = prepare(**study.prepare)
    with quiet("lm_eval"):  # a wrong task is told before the training
        load_tasks(study.tasks, data=study.prepare["output"], benchmarks=benchmarks)
    configs = {name: model_config(study, name, meta["tokenizer"]["vocab_size"]) for name in study.models}
    runs = {
        (name, seed): _train(study, config, folder / f"{name}-seed{seed}", seed)
        for seed in study.seeds
        for name, config in configs.items()
    }
    evaluations = {key: _evaluate(study, run, benchmarks) for key, run in runs.items()}
    measured = _speeds(study, {name: runs[name, study.seeds[0]] for name in study.models})
    models = []
    for (name, seed), evaluation in evaluations.items():
        model = {
            "name": name,
            "seed": seed,
            "config": configs[name].to_dict(),
            "parameters": configs[name].parameter_count(),
            "flops_per_token": configs[name].flops_per_token(study.block_length),
            "tokens": study.fit["trainer"]["max_steps"] * study.tokens_per_step,
            "bits_per_byte": {end: evaluation[BITS_PER_BYTE][end] for end in ("value", "low", "high")},
            "tasks": {task: _main_metric(evaluation["tasks"][task]) for task in study.tasks},
            "learning_curve": _learning_curve(study, runs[name, seed], meta["splits"]["validation"]["tokens"]),
            **measured[name],
        }
        if name != study.baseline:
            baseline = evaluations[study.baseline, seed]
            blocks = (scoring.BlockScores.from_dict(of[BITS_PER_BYTE]["blocks"]) for of in (evaluation, baseline))
            model["difference"] = asdict(scoring.paired_bootstrap(*blocks))
        models.append(model)
    return {
        "format_version": FORMAT_VERSION,
        "command": f"ssm-trn compare {path}",
        "study": {**asdict(study), "batch_size": study.batch_size, "block_length": study.block_length},
        "data": {
            "source": meta["settings"]["source"]["name"],
            "vocab_size": meta["tokenizer"]["vocab_size"],
            "held_out_bytes": meta["splits"]["validation"]["bytes"],
            "held_out_documents": meta["splits"]["validation"]["documents"],
        },
        "models": models,
        "machine": machine_facts(),
    }


def model_config(study: Study, name: str, vocab_size: int) -> ModelConfig:
    """The config of a study's model with the study's number of parameters."""
    config = ModelConfig.from_dict({**study.models[name], "vocab_size": vocab_size})
    try:
        return config if study.parameters is None else match_parameters(config, study.parameters)
    except ValueError as error:
        raise ValueError(f"model '{name}': {error}") from error


def _train(study: Study, config: ModelConfig, run: Path, seed: int) -> Path:
    """The run folder of a model, trained to its end: now, or by an earlier call."""
    experiment = {
        **study.fit,
        "seed_everything": seed,
        "run_folder": str(run),
        "model": {
            "class_path": "ssm_trn.training.LanguageModelModule",
            "init_args": {"config": config.to_dict(), **study.fit.get("model", {}).get("init_args", {})},
        },
        "data": {
            "class_path": "ssm_trn.data.TokenDataModule",
            "init_args": {**study.fit["data"]["init_args"], "folder": study.prepare["output"], "seed": seed},
        },
    }
    text = yaml.safe_dump(experiment, sort_keys=False)
    file = run / "experiment.yaml"
    if file.exists() and file.read_text() != text:
        raise ValueError(f"{run} holds a run of another study: choose another --output, or remove that folder")
    if not (run / "model.safetensors").exists():
        from ssm_trn.training.command_line import run as fit

        run.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
        print(f"{run}: training, {config.parameter_count():,} parameters")
        try:
            fit("fit", ["--config", str(file), "--ckpt_path", "last"])
        except Exception:
            if [*run.iterdir()] == [file]:  # nothing was trained: the mended study may use this folder
                file.unlink()
                os.removedirs(run)
            raise
    return run


def _evaluate(study: Study, run: Path, benchmarks: str | None) -> dict[str, Any]:
    """What the evaluation of a run gives."""
    print(f"{run}: evaluation")
    return evaluate(
        str(run), [BITS_PER_BYTE, *study.tasks], benchmarks=benchmarks, limit=study.task_limit, batch_size=64
    )


def _main_metric(task: dict[str, Any]) -> dict[str, Any]:
    name, score = next(iter(task["metrics"].items()))
    return {"metric": name, "items": task["items"], **score}


def _learning_curve(study: Study, run: Path, held_out_tokens: int) -> dict[str, Any]:
    """Bits per byte of the first held-out tokens over training tokens, as the run logged them."""
    with open(run / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("validation/bits_per_byte")]
    batches = study.fit["trainer"].get("limit_val_batches", 1.0)  # a number of them, or a share of all
    limit = batches * study.batch_size * study.block_length if isinstance(batches, int) else batches * held_out_tokens
    return {
        "held_out_tokens": min(held_out_tokens, int(limit)),
        "tokens": [int(row["step"]) * study.tokens_per_step for row in rows],
        "bits_per_byte": [float(row["validation/bits_per_byte"]) for row in rows],
    }


def _speeds(study: Study, runs: dict[str, Path]) -> dict[str, dict[str, Any]]:
    print("speeds, all models side by side")
    models = {name: LanguageModel.from_pretrained(run) for name, run in runs.items()}
    train = TokenFile.open(study.prepare["output"], "train")
    batch = TrainingBatches(train, study.block_length, study.batch_size, study.seeds[0])[0]
    return speeds(models, batch, study.contexts)
