"""What a comparison compares: models of the same sizes, on the same tokens in the same order, and the jobs of that."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from ssm_trn.config import ModelConfig, check_types
from ssm_trn.data.prepare import prepare
from ssm_trn.files import read_piece, read_text
from ssm_trn.matching import match_parameters

_PARTS = {"model": "ssm_trn.training.LanguageModelModule", "data": "ssm_trn.data.TokenDataModule"}
_COUNTS = {  # in a study's fit, and whether it must be there
    ("data", "init_args", "batch_size"): True,
    ("data", "init_args", "block_length"): True,
    ("trainer", "max_steps"): False,
    ("trainer", "accumulate_grad_batches"): False,
}
_ENDINGS = ("max_epochs", "max_time", "fast_dev_run")  # of Lightning's trainer, which would leave some models behind


@dataclass(frozen=True)
class Variant:
    """A model of the study in one of its sizes."""

    name: str
    model: str
    config: ModelConfig


@dataclass(frozen=True)
class Job:
    """One training: of a model, with a learning rate and a seed, on so many steps. `run` names its folder.

    A job whose learning rate is None takes the one that served its model best among the jobs that try them, or the
    training's default where none do.
    """

    run: str
    variant: Variant
    learning_rate: float | None
    seed: int
    steps: int
    tries: bool = False


@dataclass(frozen=True)
class Study:
    """What a comparison compares.

    Args:
        title: heading of the report.
        models: by name, the fields of a ModelConfig or a YAML file with them; vocab_size comes from the data. The name
            of a mixer instead stands for a model of `shape` with that mixer in each layer.
        baseline: the model that the others are compared with.
        prepare: arguments of `ssm-trn prepare`.
        fit: a configuration of `ssm-trn fit` without the model's config, seeds and run folder; its parts may be YAML
            files. The paths of such files, and of models, are relative to the study's file.
        output: folder of the runs and the report.
        shape: {d_model, n_layers} of the models that are named by their mixer.
        parameters: the size, or the sizes, that each model is brought to by `match_parameters`; None: models as given.
        tokens: of a training; by default max_steps of `fit` decides.
        tokens_per_parameter: the same in proportion to the size, for a study of several sizes.
        seeds: of the initial weights and of the order of the data; one run each.
        learning_rates: to try with the first seed; each model has its best by validation loss. None: that of `fit`.
        search_tokens: of a training that only tries a learning rate; by default as many as of the others, so that the
            best of these trainings is the first seed's.
        tasks: that `ssm-trn evaluate` knows.
        task_limit: items of each task; None: all.
        contexts: lengths at which decoding is timed.
        position_length: longest context of the loss by position; by default the block length of the training.
    """

    title: str
    models: dict[str, Any]
    baseline: str
    prepare: dict[str, Any]
    fit: dict[str, Any]
    output: str
    shape: dict[str, int] = field(default_factory=dict)
    parameters: int | list[int] | None = None
    tokens: int | None = None
    tokens_per_parameter: float | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    learning_rates: list[float] | None = None
    search_tokens: int | None = None
    tasks: list[str] = field(default_factory=list)
    task_limit: int | None = None
    contexts: list[int] = field(default_factory=lambda: [256, 2048])
    position_length: int | None = None

    def __post_init__(self):
        if self.baseline not in self.models:
            raise ValueError(f"the baseline '{self.baseline}' is none of the models {', '.join(self.models)}")
        for name, model in self.models.items():
            _check_mapping(name, model)
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
                raise ValueError(f"the model {name!r} cannot name a folder: use letters, digits and _")
        self._check_fit()
        unknown = self.prepare.keys() - signature(prepare).parameters.keys()
        if unknown or "output" not in self.prepare:
            wrong = f"has '{min(unknown)}'" if unknown else "lacks 'output'"
            raise ValueError(f"the study's prepare {wrong}: give the arguments of ssm-trn prepare")
        check_types("the study's prepare", self.prepare, get_type_hints(prepare))
        self._check_numbers()
        self._check_budget()

    def _check_fit(self) -> None:
        """That what is set is of use: another class, an option or a limit would be lost, or shorten some trainings."""
        _check_mapping("trainer", self.trainer)
        for name, class_path in _PARTS.items():
            part = self.fit.get(name, {})
            _check_mapping(name, part)
            _check_mapping(f"{name}.init_args", part.get("init_args", {}))
            if part.keys() - {"class_path", "init_args"} or part.get("class_path", class_path) != class_path:
                raise ValueError(f"the study's fit.{name} takes init_args, and no class_path but {class_path}")
        for keys, needed in _COUNTS.items():
            value = _value(self.fit, keys)
            if value is None and needed:
                raise ValueError(f"the study's fit does not set {'.'.join(keys)}")
            if value is not None and not (type(value) is int and value >= 1):
                raise ValueError(f"{'.'.join(keys)} of the study's fit is {value!r}; it must be a number from 1 on")
        if self.init_args.get("config") is not None:
            raise ValueError("the study's fit has a model's config: each of the study's models has its own")
        if ends := [name for name in _ENDINGS if self.trainer.get(name)]:
            raise ValueError(f"the study's trainer sets {ends[0]}: a training ends after max_steps or tokens")
        rate = self.init_args.get("learning_rate", 1.0)
        if not (type(rate) in (int, float) and 0 < rate < math.inf):
            raise ValueError(f"learning_rate of the study's fit is {rate!r}; it must be a number above 0, as in 1.0e-3")

    def _check_numbers(self) -> None:
        counts = {"task_limit": self.task_limit, "search_tokens": self.search_tokens, "tokens": self.tokens}
        counts |= {"position_length": self.position_length, "contexts": min(self.contexts, default=0)}
        counts |= {"parameters": min(self.sizes, default=0)}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} of a study must be at least 1")
        in_range = all(0 <= seed < 2**32 for seed in self.seeds)
        if not self.seeds or not in_range or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("a study needs at least one seed, all of them different, from 0 on and below 2**32")
        if len(set(self.contexts)) < max(2, len(self.contexts)):
            raise ValueError("a study needs two context lengths at least, all of them different")
        rates = self.learning_rates
        if rates is not None and not (
            rates and all(0 < rate < math.inf for rate in rates) and len(set(map(_short_rate, rates))) == len(rates)
        ):
            raise ValueError("learning_rates of a study must be different numbers above 0")

    def _check_budget(self) -> None:
        budgets = [self.tokens, self.tokens_per_parameter, self.trainer.get("max_steps")]
        if sum(budget is not None for budget in budgets) != 1:
            raise ValueError("a study sets one of tokens, tokens_per_parameter and trainer.max_steps of its fit")
        if self.tokens_per_parameter is not None and not 0 < self.tokens_per_parameter < math.inf:
            raise ValueError("tokens_per_parameter of a study must be a number above 0")
        interval, limit = (self.trainer.get(name) for name in ("val_check_interval", "limit_val_batches"))
        if len(self.learning_rates or []) > 1 and (type(interval) is not int or limit == 0):
            raise ValueError(
                "learning rates are chosen by the validation loss: set val_check_interval of the study's trainer to a "
                "number of batches, and limit_val_batches not to 0"
            )

    @property
    def sizes(self) -> list[int | None]:
        return list(self.parameters) if isinstance(self.parameters, list) else [self.parameters]

    @property
    def trainer(self) -> dict[str, Any]:
        return self.fit.get("trainer", {})

    @property
    def batch_size(self) -> int:
        return self.fit["data"]["init_args"]["batch_size"]

    @property
    def block_length(self) -> int:
        return self.fit["data"]["init_args"]["block_length"]

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_length * self.accumulated

    @property
    def accumulated(self) -> int:
        """Batches of a step."""
        return self.trainer.get("accumulate_grad_batches") or 1

    def variants(self, vocab_size: int) -> list[Variant]:
        """Each model in each size, the baseline's sizes and names among them."""
        several = len(self.sizes) > 1
        variants = [
            Variant(f"{name}-{short_count(size)}" if several else name, name, self._config(name, size, vocab_size))
            for size in self.sizes
            for name in self.models
        ]
        _check_different([variant.name for variant in variants])
        return variants

    def _config(self, name: str, size: int | None, vocab_size: int) -> ModelConfig:
        try:
            config = ModelConfig.from_dict({**self.models[name], "vocab_size": vocab_size})
            return config if size is None else match_parameters(config, size)
        except ValueError as error:
            raise ValueError(f"model '{name}': {error}") from error

    def jobs(self, variants: list[Variant]) -> list[Job]:
        """All trainings: those that try learning rates first, then seed by seed."""
        rates = self.learning_rates or [self._own_rate]
        if len(rates) == 1:
            return [
                Job(f"{variant.name}-seed{seed}", variant, rates[0], seed, self._steps(variant))
                for seed in self.seeds
                for variant in variants
            ]
        jobs = self._tries(variants, rates)
        seeds = self.seeds[1:] if self.search_tokens is None else self.seeds
        jobs += [
            Job(f"{variant.name}-seed{seed}", variant, None, seed, self._steps(variant))
            for seed in seeds
            for variant in variants
        ]
        _check_different([job.run for job in jobs])
        return jobs

    def _tries(self, variants: Sequence[Variant], rates: Sequence[float]) -> list[Job]:
        first = self.seeds[0]
        ending = f"seed{first}" if self.search_tokens is None else "search"
        tries = [
            Job(
                f"{variant.name}-lr{_short_rate(rate)}-{ending}",
                variant,
                rate,
                first,
                self._steps(variant) if self.search_tokens is None else self._steps_of(self.search_tokens),
                tries=True,
            )
            for variant in variants
            for rate in rates
        ]
        if (fewest := min(job.steps for job in tries)) * self.accumulated < self.trainer["val_check_interval"]:
            raise ValueError(
                f"val_check_interval of the study's trainer is more than the {fewest * self.accumulated} batches of a "
                "training that tries a learning rate: make it smaller, so that there is a loss to choose by"
            )
        return tries

    @property
    def init_args(self) -> dict[str, Any]:
        return self.fit.get("model", {}).get("init_args", {})

    @property
    def _own_rate(self) -> float | None:
        return self.init_args.get("learning_rate")

    def _steps(self, variant: Variant) -> int:
        if self.tokens is not None:
            return self._steps_of(self.tokens)
        if self.tokens_per_parameter is not None:
            return self._steps_of(round(self.tokens_per_parameter * variant.config.parameter_count()))
        return self.trainer["max_steps"]

    def _steps_of(self, tokens: int) -> int:
        if tokens < self.tokens_per_step:
            raise ValueError(
                f"a training of the study has {tokens:,} tokens, fewer than the {self.tokens_per_step:,} of a step"
            )
        return tokens // self.tokens_per_step

    @classmethod
    def read(cls, path: str) -> "Study":
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"there is no study {path}: give the path of a YAML file such as experiments/*.yaml"
            )
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
        given = parser.parse_string(read_text(Path(path))).as_dict()
        values = {name: value for name, value in given.items() if value is not None}  # null: the default
        folder = Path(path).parent
        values["models"] = {
            name: _model(folder, value, values.get("shape", {})) for name, value in values["models"].items()
        }
        values["fit"] = {name: read_piece(folder, part, "the study") for name, part in values["fit"].items()}
        return cls(**values)


def _model(folder: Path, value: str | dict[str, Any], shape: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a model's config: as given, from a YAML file, or a mixer's name in the study's shape."""
    if not isinstance(value, str) or value.endswith((".yaml", ".yml")):
        return read_piece(folder, value, "the study")
    if shape.keys() != {"d_model", "n_layers"}:
        raise ValueError(f"the study names the mixer {value}: give its shape with d_model and n_layers, and no more")
    return {"d_model": shape["d_model"], "layers": [value] * shape["n_layers"]}


def _check_mapping(name: str, part: Any) -> None:
    if not isinstance(part, dict):
        raise ValueError(f"the study's '{name}' is {part!r}, which should be a mapping or a YAML file with one")


def _check_different(names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two models, sizes or trainings of the study are called {twice[0]}: make them more different")


def _short_rate(rate: float) -> str:
    return f"{rate:g}"


def _value(values: Any, keys: tuple[str, ...]) -> Any:
    """What stands under nested keys; None where there is nothing."""
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return None
        values = values[key]
    return values


def short_count(count: int | None) -> str:
    """A number of parameters or tokens in three digits: 500k, 2.1M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count is not None and count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
