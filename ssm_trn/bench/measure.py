"""Measurements of several implementations side by side, on one thread.

They take turns in one process and are timed in CPU time of that process, which stands still while another program has
the core. Before that each runs once, and the results of that run must agree. Memory is what a fresh process grows by
while it runs one call.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssm_trn.ops.contexts import one_thread
from ssm_trn.runtime import tune_malloc
from ssm_trn.timing import take_turns

OURS = "ssm_trn"
LARGEST_DIFFERENCE = 1e-4
WARM_UP_LENGTH = 64


@dataclass(frozen=True)
class Side:
    """One of those who are compared: a call that returns tensors, and for a model its number of parameters."""

    call: Callable[[], Iterable[Tensor]]
    parameters: int | None = None


@dataclass(frozen=True)
class Target:
    """That `peer` takes at least `ratio` times the time ("seconds") or memory ("bytes") that `ours` takes."""

    title: str
    peer: str
    ratio: float
    ours: str = OURS
    quantity: str = "seconds"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Args:
        build: makes the sides by name for a number of time steps; a module's function, or a `partial` of one.
        length: number of time steps.
        rounds: how often each side is timed.
        targets: what is to be shown.
        same: whether all sides compute the same thing.
    """

    build: Callable[[int], dict[str, Side]]
    length: int
    rounds: int
    targets: tuple[Target, ...]
    same: bool = True


def measure(comparison: Comparison, rounds: int | None = None) -> list[dict[str, Any]]:
    """A row of results for each target; where a side cannot run or computes something else, it tells the reason."""
    torch.manual_seed(0)
    with one_thread():
        try:
            sides = comparison.build(comparison.length)
            results = {name: list(side.call()) for name, side in sides.items()}
        except ImportError as error:  # peers import their libraries when they are called
            known = isinstance(error, ModuleNotFoundError)  # any other one says itself how to mend it
            reason = f"{error}; the extra 'dev' brings it" if known else str(error)
            return [_row(comparison, target, not_measured=reason) for target in comparison.targets]
        difference = largest_difference(results) if comparison.same else None
        del results
        if difference is not None and not difference < LARGEST_DIFFERENCE:  # or NaN
            reason = f"the results differ by {difference:.1e}"
            return [_row(comparison, target, not_measured=reason) for target in comparison.targets]
        calls = {name: side.call for name, side in sides.items()}
        seconds = take_turns(calls, rounds or comparison.rounds, time.process_time)
    rows = []
    for target in comparison.targets:
        if target.quantity == "seconds":
            samples = seconds
        elif sys.platform == "linux":
            samples = {name: [peak_growth(comparison, name)] for name in (target.ours, target.peer)}
        else:
            reason = "the peak of memory is read from /proc, which only Linux has"
            rows.append(_row(comparison, target, not_measured=reason))
            continue
        parameters = {name: side.parameters for name, side in sides.items()}
        rows.append(_row(comparison, target, difference=difference, **_figures(target, samples, parameters)))
    return rows


def _row(comparison: Comparison, target: Target, **found: Any) -> dict[str, Any]:
    return {
        "title": target.title,
        "length": comparison.length,
        "against": target.peer,
        "quantity": target.quantity,
        "target_ratio": target.ratio,
        **found,
    }


def _figures(
    target: Target, samples: Mapping[str, list[float]], parameters: Mapping[str, int | None]
) -> dict[str, Any]:
    sides = {
        role: {"median": statistics.median(samples[name]), "samples": samples[name], "parameters": parameters[name]}
        for role, name in (("ours", target.ours), ("peer", target.peer))
    }
    ratios = [peer / ours for ours, peer in zip(samples[target.ours], samples[target.peer], strict=True)]
    return {
        **sides,
        "ratio": sides["peer"]["median"] / sides["ours"]["median"],
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }


def largest_difference(results: Mapping[str, list[Tensor]]) -> float:
    """Largest ||a - b|| / ||b|| between a tensor of the first side and its like of another."""
    first, *others = results.values()
    differences = [(a - b).norm() / b.norm() for other in others for a, b in zip(first, other, strict=True)]
    return float(torch.stack(differences).max())


def peak_growth(comparison: Comparison, name: str) -> int:
    """Bytes of memory by which a process grows, at its peak, while one side runs once."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
        return fresh_process.submit(_peak_growth, comparison, name).result()


def _peak_growth(comparison: Comparison, name: str) -> int:
    tune_malloc()
    torch.set_num_threads(1)
    comparison.build(WARM_UP_LENGTH)[name].call()  # code that runs for the first time takes memory of its own
    call = comparison.build(comparison.length)[name].call
    return peak_while(call)


def peak_while(call: Callable[[], object]) -> int:
    """Bytes by which this process, which must be a fresh one, grows at its peak while it runs `call`."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)  # else the call would use again what was freed before, and need less
    before = process_memory("VmRSS")
    call()
    return process_memory("VmHWM") - before


def process_memory(field: str) -> int:
    """Bytes of this process as Linux counts them: VmRSS is what it holds, VmHWM the most that it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
