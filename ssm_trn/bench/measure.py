"""Side-by-side measurements on one thread.

Those who are compared take turns in one process, in an order that rotates, and are timed in CPU time of the process:
other programs on the machine then cost nobody a turn and all of them the same caches. Before that, each runs once, and
the results of that run must agree. Memory is what a fresh process grows by while it runs one call.
"""

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

OURS = "ssm_trn"
LARGEST_DIFFERENCE = 1e-4
WARM_UP_LENGTH = 64


@dataclass(frozen=True)
class Side:
    """One of those who are compared: a call that returns tensors, and for a model its number of parameters."""

    call: Callable[[], Iterable[Tensor]]
    parameters: int | None = None


@dataclass(frozen=True)
class Promise:
    """That `ours` takes at most 1 / ratio of the time ("seconds") or of the memory ("bytes") that `peer` takes."""

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
        promises: what is to be shown.
        same: whether all sides compute the same thing.
    """

    build: Callable[[int], dict[str, Side]]
    length: int
    rounds: int
    promises: tuple[Promise, ...]
    same: bool = True


def measure(comparison: Comparison, rounds: int | None = None) -> list[dict[str, Any]]:
    """A row of results for each promise; where a side cannot run or differs from ours, the row says why instead."""
    torch.manual_seed(0)
    with one_thread():
        try:
            sides = comparison.build(comparison.length)
            results = {name: list(side.call()) for name, side in sides.items()}
        except ImportError as error:  # the peers' modules are imported when they are called
            return _rows_without_figures(comparison, f"{error}: it comes with the extra 'dev'")
        difference = largest_difference(results) if comparison.same else None
        del results
        if difference is not None and not difference < LARGEST_DIFFERENCE:
            return _rows_without_figures(comparison, f"the results differ by {difference:.1e}")
        seconds = take_turns({name: side.call for name, side in sides.items()}, rounds or comparison.rounds)
    rows = []
    for promise in comparison.promises:
        row = {**_head(comparison, promise), "difference": difference}
        if promise.quantity == "bytes" and sys.platform != "linux":
            row["not_measured"] = "peak memory is read from /proc, which only Linux has"
            rows.append(row)
            continue
        for role, name in (("ours", promise.ours), ("peer", promise.peer)):
            samples = seconds[name] if promise.quantity == "seconds" else [peak_growth(comparison, name)]
            row[role] = {
                "name": name,
                "median": statistics.median(samples),
                "samples": samples,
                "parameters": sides[name].parameters,
            }
        ratios = [peer / ours for ours, peer in zip(row["ours"]["samples"], row["peer"]["samples"], strict=True)]
        row |= {
            "ratio": row["peer"]["median"] / row["ours"]["median"],
            "lowest_ratio": min(ratios),
            "highest_ratio": max(ratios),
        }
        rows.append(row)
    return rows


def _rows_without_figures(comparison: Comparison, reason: str) -> list[dict[str, Any]]:
    return [{**_head(comparison, promise), "not_measured": reason} for promise in comparison.promises]


def _head(comparison: Comparison, promise: Promise) -> dict[str, Any]:
    return {
        "title": promise.title,
        "length": comparison.length,
        "against": promise.peer,
        "quantity": promise.quantity,
        "promised_ratio": promise.ratio,
    }


def take_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each call in each round; in each round another one is the first."""
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return seconds


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
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # free memory in the process's hands is not
    before = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    """A figure of this process as Linux keeps it: VmRSS is the memory in use, VmHWM the most that ever was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
