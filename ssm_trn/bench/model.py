"""`ssm-trn bench model`: what models cost on this device, side by side: training, reading a prompt, decoding, memory.

All figures are of wall-clock time. The models take turns, so that whatever else the machine does meets them alike; each
figure is the median over rounds.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn.accelerators.devices import memory
from ssm_trn.bench.hardware import EnergyMeter, Lap, Stopwatch
from ssm_trn.bench.measure import peak_while
from ssm_trn.config import ModelConfig
from ssm_trn.data.datamodule import IGNORED
from ssm_trn.generation import Generation
from ssm_trn.model import LanguageModel
from ssm_trn.runtime import tune_malloc
from ssm_trn.state import map_state
from ssm_trn.timing import take_turns

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Workload:
    """What the models do.

    Args:
        block_length: time steps of a training block.
        batch_size: blocks of a training step.
        contexts: lengths of the prompts behind which tokens are decoded.
        new_tokens: how many are decoded.
        sequences: prompts at once.
        rounds: how often each is timed.
        dtype: "float32" or "bfloat16", of weights and activations.
    """

    block_length: int = 512
    batch_size: int = 4
    contexts: Sequence[int] = (128, 512, 2048)
    new_tokens: int = 32
    sequences: int = 1
    rounds: int = 5
    dtype: str = "float32"

    def __post_init__(self):
        for name in ("block_length", "batch_size", "new_tokens", "sequences", "rounds"):
            if getattr(self, name) < (2 if name == "block_length" else 1):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, block_length at least 2")
        if not self.contexts or min(self.contexts) < 1 or len(set(self.contexts)) < len(self.contexts):
            raise ValueError(f"contexts are {list(self.contexts)}; give different lengths of at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}; choose {' or '.join(DTYPES)}")

    def batch(self, vocab_size: int) -> dict[str, Tensor]:
        """Random tokens to train on."""
        tokens = torch.randint(vocab_size, (self.batch_size, self.block_length + 1))
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


@dataclass(frozen=True)
class Timing:
    """Medians over rounds, and how long the very first call took, with what is compiled or set up then."""

    seconds: float
    joules: float | None
    first_seconds: float
    samples: list[float]

    @classmethod
    def of(cls, laps: Sequence[Lap]) -> "Timing":
        first, *others = laps
        seconds, joules = [lap.seconds for lap in others], [lap.joules for lap in others]
        return cls(
            statistics.median(seconds),
            None if None in joules else statistics.median(joules),
            first.seconds,
            seconds,
        )


def training_timings(
    models: Mapping[str, LanguageModel],
    batch: Mapping[str, Tensor],
    rounds: int,
    meter: EnergyMeter | None = None,
) -> dict[str, Timing]:
    """Training steps (forward, loss, backward, clipping, AdamW) on one batch. The models' weights change a little."""
    steps = {name: training_step(model, batch) for name, model in models.items()}
    laps = _take_laps(
        {name: lambda watch, step=step: _lap(watch, step) for name, step in steps.items()}, models, rounds, meter
    )
    return {name: Timing.of([lap for (lap,) in rows]) for name, rows in laps.items()}


def training_step(model: LanguageModel, batch: Mapping[str, Tensor]) -> Callable[[], None]:
    """A step on a batch {tokens, targets and perhaps reset}, to be called again and again."""
    device = model.embedding.weight.device
    batch = {name: x.to(device) for name, x in batch.items()}
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)

    def step() -> None:
        logits, _ = model(batch["tokens"], reset=batch.get("reset"))
        F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def generation_timings(
    models: Mapping[str, LanguageModel],
    contexts: Sequence[int],
    rounds: int,
    new_tokens: int = 32,
    sequences: int = 1,
    meter: EnergyMeter | None = None,
) -> dict[tuple[str, int], tuple[Timing, Timing]]:
    """For each model and context: until the first new token is there, and all of the others together.

    Tokens are chosen greedily behind random prompts, through the same loop as `ssm-trn generate`.
    """

    def generate(model: LanguageModel, prompts: list[list[int]], watch: Stopwatch) -> list[Lap]:
        watch.lap()
        generation = Generation(model, prompts, new_tokens + 1)
        next(generation)
        first = watch.lap()
        for _ in generation:
            pass
        return [first, watch.lap()]

    calls: dict[tuple[str, int], Callable[[Stopwatch], list[Lap]]] = {}
    for name, model in models.items():
        for context in contexts:
            prompts = torch.randint(model.config.vocab_size, (sequences, context)).tolist()
            calls[name, context] = lambda watch, model=model, prompts=prompts: generate(model, prompts, watch)
    laps = _take_laps(calls, {key: models[key[0]] for key in calls}, rounds, meter)
    return {key: tuple(Timing.of(column) for column in zip(*rows, strict=True)) for key, rows in laps.items()}


def _lap(watch: Stopwatch, call: Callable[[], None]) -> list[Lap]:
    watch.lap()
    call()
    return [watch.lap()]


def _take_laps(calls: Mapping, models: Mapping, rounds: int, meter: EnergyMeter | None) -> dict:
    """What each call returned: first in one round to warm up, then in the rounds that count."""
    watches = {key: Stopwatch(models[key].embedding.weight.device, meter) for key in calls}
    laps: dict = {key: [] for key in calls}
    recorded = {key: lambda key=key: laps[key].append(calls[key](watches[key])) for key in calls}
    take_turns(recorded, rounds=1)
    take_turns(recorded, rounds)
    return laps


def state_bytes(model: LanguageModel, context: int) -> int:
    """Bytes of the state that one sequence needs behind `context` tokens, in the dtypes it has."""
    sizes: list[int] = []

    def count(part: Tensor) -> Tensor:
        sizes.append(part.numel() * part.element_size())
        return part

    map_state(count, model.init_state(1, context, device="meta"))
    return sum(sizes)


def bytes_per_token(model: LanguageModel, context: int, sequences: int) -> float:
    """Bytes that a decoded token makes the device read: the weights, shared by the sequences, and a state.

    Of an embedding that is not the head as well, the one row that is looked up is left out.
    """
    unread = 0 if model.head is None else model.embedding.weight.numel() * model.embedding.weight.element_size()
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - unread
    return weights / sequences + state_bytes(model, context)


def training_memory(config: ModelConfig, workload: Workload, device: torch.device) -> int | None:
    """Peak bytes of a training step with weights, gradients and optimizer, in a fresh process; None where unknown."""
    if device.type not in ("cpu", "cuda"):  # a NeuronCore belongs to one process
        return memory(device).peak
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
        try:
            return fresh_process.submit(_training_memory, config, workload, str(device)).result()
        except BrokenProcessPool:  # killed, most likely for want of memory: the other figures are worth having
            return None


def _training_memory(config: ModelConfig, workload: Workload, device: str) -> int | None:
    tune_malloc()
    small = LanguageModel(config)  # code that runs for the first time takes memory of its own
    training_step(small, {name: x[:1, :16] for name, x in workload.batch(config.vocab_size).items()})()
    del small

    def train() -> None:
        model = LanguageModel(config).to(device, DTYPES[workload.dtype])
        step = training_step(model, workload.batch(config.vocab_size))
        step()  # makes the optimizer's state
        step()

    if device != "cpu":
        train()
        return memory(torch.device(device)).peak
    return peak_while(train)


def figures(
    model: LanguageModel,
    training: Timing,
    generation: Mapping[int, tuple[Timing, Timing]],
    workload: Workload,
    limits: Mapping[str, float],
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """The figures of one model; `limits` has the device's "flops" and "bytes" per second."""
    trained = workload.batch_size * workload.block_length
    flops = 3 * model.config.flops_per_token(workload.block_length)  # of a token: forward once, backward twice that
    rows = []
    for context, (first, others) in generation.items():
        decoded = workload.new_tokens * workload.sequences
        moved = bytes_per_token(model, context, workload.sequences)
        rows.append(
            {
                "context": context,
                "seconds_to_first_token": first.seconds,
                "seconds_per_token": others.seconds / workload.new_tokens,
                "state_bytes": state_bytes(model, context),
                "bandwidth_utilisation": moved * decoded / others.seconds / limits["bytes"],
                "first_call_seconds": first.first_seconds + others.first_seconds,
                **_rates(others, decoded, price_per_hour),
            }
        )
    return {
        "parameters": model.parameter_count(),
        "config": model.config.to_dict(),
        "training": {
            "seconds_per_step": training.seconds,
            "samples": training.samples,
            "flops_per_token": flops,
            "flops_utilisation": flops * trained / training.seconds / limits["flops"],
            "first_call_seconds": training.first_seconds,
            **_rates(training, trained, price_per_hour),
        },
        "generation": rows,
    }


def _rates(timing: Timing, tokens: int, price_per_hour: float | None) -> dict[str, Any]:
    """Tokens per second, and joules and price of a million tokens where they are known."""
    rates: dict[str, Any] = {"tokens_per_second": tokens / timing.seconds}
    if timing.joules is not None:
        rates["joules_per_million_tokens"] = timing.joules / tokens * 1e6
    if price_per_hour is not None:
        rates["price_per_million_tokens"] = price_per_hour / 3600 * timing.seconds / tokens * 1e6
    return rates
