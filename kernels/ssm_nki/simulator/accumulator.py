"""The registers, one for each partition, in which ScalarE and VectorE sum up over several instructions."""

from __future__ import annotations

from enum import Enum

import numpy as np

from ssm_nki.simulator.errors import require
from ssm_nki.simulator.generations import PARTITIONS
from ssm_nki.simulator.operators import Operator

NEUTRAL = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


class ReduceCommand(Enum):
    """What an instruction does with the registers of its engine."""

    idle = 0  # leaves them
    reset = 1  # sets them to the operator's neutral element
    reduce = 2  # combines its result with them
    reset_reduce = 3  # resets, then combines
    load_reduce = 4  # loads a given value, then combines


class Accumulator:
    """Registers of one engine; they hold nothing until an instruction resets or loads them."""

    def __init__(self) -> None:
        self._registers: np.ndarray | None = None

    def prepare(self, operator: Operator, command: ReduceCommand, initial: np.ndarray | float | None = None) -> None:
        """Reset or load the registers as `command` says."""
        if command in (ReduceCommand.reset, ReduceCommand.reset_reduce):
            self._registers = np.full((PARTITIONS, 1), NEUTRAL[operator.name], np.float32)
        if command is ReduceCommand.load_reduce:
            self._registers = np.zeros((PARTITIONS, 1), np.float32)
            self._registers[: np.size(initial) if isinstance(initial, np.ndarray) else None] = initial

    def read(self, partitions: int) -> np.ndarray:
        """The registers of the first `partitions` partitions, [partitions, 1]."""
        require(self._registers is not None, "The accumulators are read before they were reset.")
        return self._registers[:partitions]  # type: ignore[index]

    def update(self, value: np.ndarray, operator: Operator, command: ReduceCommand) -> None:
        """Do `command` with `value`, [partitions, 1]."""
        self.prepare(operator, command)
        if command is not ReduceCommand.reset:
            self.store(operator(self.read(len(value)), value))

    def store(self, value: np.ndarray) -> None:
        """Write the registers of the first partitions."""
        self.read(len(value))[...] = value
