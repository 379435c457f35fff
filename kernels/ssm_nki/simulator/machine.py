"""The NeuronCore that runs a kernel: its generation, what it has allocated, its accumulators and its trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ssm_nki.simulator import dtypes, generations
from ssm_nki.simulator.accumulator import Accumulator
from ssm_nki.simulator.errors import KernelError, require
from ssm_nki.simulator.memory import Buffer, Storage, Tensor, check_allocation
from ssm_nki.simulator.trace import Trace

_running: list[Machine] = []


class Machine:
    """One NeuronCore of a generation ("gen2" or "trn1", "gen3" or "trn2", "gen4" or "trn3").

    Args:
        generation: whose rules hold; by default what NEURON_PLATFORM_TARGET_OVERRIDE says, or gen2.
        compute: False leaves out all arithmetic: shapes, rules and costs are still checked, in a fraction of the time.

    `run` may be called several times; `trace` is that of the last run.
    """

    def __init__(self, generation: str | None = None, compute: bool = True) -> None:
        self.generation = generations.find(generation)
        self.compute = compute
        self._reset()

    def _reset(self) -> None:
        self.trace = Trace(self.generation)
        self.scalar_accumulator = Accumulator()
        self.vector_accumulator = Accumulator()
        self._allocations = 0
        self._portable = True

    def run(self, kernel: Callable, *arguments: Any, **keywords: Any) -> Any:
        """The results of `kernel`, as arrays, for arguments of which arrays lie in HBM.

        Raises:
            KernelError: the kernel breaks a rule of the machine, or leaves an element of a result unwritten.
        """
        function = getattr(kernel, "function", kernel)
        self._reset()
        self._portable = getattr(kernel, "portable", True)
        with self.running():
            result = function(*map(self._enter, arguments), **{key: self._enter(x) for key, x in keywords.items()})
        self.trace.check_capacity()
        return self._leave(result)

    @contextmanager
    def running(self) -> Iterator[Machine]:
        """Within this context, calls of nki.language and nki.isa go to this machine."""
        _running.append(self)
        try:
            yield self
        finally:
            _running.pop()

    def allocate(
        self, shape: tuple[int, ...], dtype: Any, buffer: Buffer, name: str = "", values: np.ndarray | None = None
    ) -> Tensor:
        """A new tensor: uninitialised, or with `values`."""
        shape, dtype = tuple(map(int, shape)), dtypes.find(dtype)
        check_allocation(shape, dtype, buffer, self.generation.sbuf_bytes)
        storage = Storage(self._allocations, shape, dtype, buffer, name, values, self._portable)
        if values is None and self.compute:
            storage.poison()
        self._allocations += 1
        return Tensor(storage, storage.values, storage.state)

    def _enter(self, argument: Any) -> Any:
        if isinstance(argument, np.ndarray):
            array = np.ascontiguousarray(argument)
            return self.allocate(array.shape, array.dtype, Buffer.hbm, values=array)
        return argument

    def _leave(self, result: Any) -> Any:
        if isinstance(result, tuple | list):
            return type(result)(map(self._leave, result))
        if not isinstance(result, Tensor):
            return result
        require(not result.buffer.on_chip, "A kernel returns tensors in HBM, not {!r}.", result)
        missing = int((result.state == 0).sum())
        require(missing == 0, "The kernel returns {!r} with {} elements that it never wrote.", result, missing)
        return result.values


def is_running() -> bool:
    """Whether a kernel is running."""
    return bool(_running)


def current() -> Machine:
    """The machine that runs the kernel which is calling."""
    if not _running:
        raise KernelError("No kernel is running: call a function decorated with nki.jit, or use Machine(...).run.")
    return _running[-1]
