"""Timing side by side."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def take_turns(
    calls: Mapping[Name, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Name, list[float]]:
    """Seconds of each call in each round, so that whatever else the machine does meets all of them alike.

    In each round another one is the first.
    """
    names = list(calls)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return seconds
