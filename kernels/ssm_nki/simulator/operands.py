"""What every instruction has in common: which engine reaches which memory, partitions, access patterns, casts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from ssm_nki.simulator import generations
from ssm_nki.simulator.dtypes import FLOAT32, cast
from ssm_nki.simulator.errors import KernelError, UnsupportedError, require
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.memory import WRITTEN, Buffer, Tensor
from ssm_nki.simulator.operators import Operator
from ssm_nki.simulator.trace import Instruction, describe


class Engine(Enum):
    """Engines of a NeuronCore; `unknown` leaves the choice to the compiler."""

    tensor = 1
    vector = 2
    scalar = 3
    gpsimd = 4
    dma = 5
    sync = 6
    unknown = 0


_HBM = {Buffer.hbm, Buffer.shared_hbm, Buffer.private_hbm}
_ON_CHIP = {Buffer.sbuf, Buffer.psum}
_READS: dict[Engine, set[Buffer]] = {
    Engine.tensor: {Buffer.sbuf},
    Engine.vector: _ON_CHIP,
    Engine.scalar: _ON_CHIP,
    Engine.gpsimd: {Buffer.sbuf},
    Engine.dma: {Buffer.sbuf} | _HBM,
}
_WRITES = _READS | {Engine.tensor: {Buffer.psum}}


def instruction(function: Callable) -> Callable:
    """Make `function` an instruction of nki.isa.

    It takes `name=`, its errors begin with its own name, and parameters annotated as Tensor or Operator must be that.
    """
    signature = inspect.signature(function)
    kinds = {"Tensor": Tensor, "Operator": Operator}
    typed = [(key, kinds[p.annotation]) for key, p in signature.parameters.items() if p.annotation in kinds]

    @functools.wraps(function)
    def call(*arguments: Any, name: str | None = None, **keywords: Any) -> None:
        try:
            for key in keywords:
                if key not in signature.parameters:
                    raise UnsupportedError(f"the simulator does not have the parameter {key}.")
            try:
                given = signature.bind(*arguments, **keywords).arguments
            except TypeError as error:
                raise KernelError(f"{error}.") from None
            for key, kind in typed:
                right = key not in given or isinstance(given[key], kind)
                require(right, "{}={!r} is no {}.", key, given.get(key), kind.__name__.lower())
            function(*arguments, **keywords)
        except KernelError as error:
            raise type(error)(f"nisa.{function.__name__}: {error}") from error

    return call


def issue(
    name: str,
    engine: Engine,
    writes: Sequence[Tensor],
    reads: Sequence[Tensor],
    compute: Callable[[], Any],
    operators: Sequence[Operator | None] = (),
    options: Sequence[str] = (),
    state: int = WRITTEN,
) -> None:
    """Check the operands of instruction `name`, record it, compute it and write its results.

    `compute` returns the values of `writes` (one array, or a tuple of arrays), in any shape of the right size.
    `state` is what the written elements become.
    """
    for tensor in writes:
        _check_operand(tensor, engine, _WRITES, "written")
        overlaps = any(stride == 0 and count > 1 for stride, count in tensor.access_pattern)
        require(not overlaps, "{!r} is written through a stride of 0.", tensor)
        require(not tensor.storage.is_argument, "{!r} is an argument; a kernel writes what it allocates.", tensor)
    for tensor in reads:
        _check_operand(tensor, engine, _READS, "read")
        require(bool(tensor.state.all()), "{!r} is read, and some of its elements were never written.", tensor)
    machine = current()
    machine.trace.instructions.append(
        Instruction(
            name,
            engine.name,
            tuple(map(describe, writes)),
            tuple(map(describe, reads)),
            tuple(operator.name for operator in operators if operator is not None),
            frozenset(options),
        )
    )
    if machine.compute:
        with np.errstate(all="ignore"):  # the engines signal nothing either
            results = compute()
            for tensor, result in zip(writes, results if isinstance(results, tuple) else (results,), strict=True):
                tensor.values[...] = cast(np.asarray(result), tensor.dtype).reshape(tensor.shape)
    for tensor in writes:
        tensor.state[...] = state


def _check_operand(tensor: Tensor, engine: Engine, reach: dict[Engine, set[Buffer]], verb: str) -> None:
    require(tensor.buffer in reach[engine], "{!r} cannot be {} by the {} engine.", tensor, verb, engine.name)
    if tensor.buffer.on_chip and engine is not Engine.dma:
        starts = generations.start_partitions(tensor.partitions)
        require(
            tensor.start_partition in starts,
            "{!r} starts at partition {}; {} partitions start at {}.",
            tensor,
            tensor.start_partition,
            tensor.partitions,
            starts,
        )
        encodable = all(
            stride <= generations.STRIDE_LIMIT and count <= generations.COUNT_LIMIT
            for stride, count in tensor.access_pattern
        )
        require(encodable, "{!r} has a stride or a size that an instruction cannot hold.", tensor)
        dimensions = len(tensor.access_pattern)
        limit = generations.FREE_DIMENSIONS
        require(
            dimensions <= limit,
            "{!r} has {} free dimensions of different strides; {} at most.",
            tensor,
            dimensions,
            limit,
        )


def same_shape(*tensors: Tensor) -> None:
    """All operands have as many partitions, and as many elements in each."""
    sizes = {(tensor.partitions, tensor.free_size) for tensor in tensors}
    require(len(sizes) == 1, "Partitions or elements per partition differ: {}.", tensors)


def not_both_in_psum(first: Tensor, second: Tensor) -> None:
    """VectorE reads at most one of two tensors from PSUM."""
    both = first.buffer is Buffer.psum and second.buffer is Buffer.psum
    require(not both, "{!r} and {!r} are both in PSUM; one must be in SBUF.", first, second)


def pick(engine: Engine, *allowed: Engine) -> Engine:
    """The engine asked for, or the first of `allowed` if the choice is left to the compiler."""
    names = ", ".join(choice.name for choice in allowed)
    require(engine is Engine.unknown or engine in allowed, "The {} engine cannot do this; {} can.", engine.name, names)
    return allowed[0] if engine is Engine.unknown else engine


def column(operand: Any, data: Tensor, role: str, any_dtype: bool = False) -> list[Tensor]:
    """Check a scalar operand, a number or a (partitions, 1) tile; return the tiles that are read for it."""
    if not isinstance(operand, Tensor):
        require(isinstance(operand, int | float | np.number), "{}={!r} is neither a number nor a tile.", role, operand)
        return []
    require(
        operand.partitions == data.partitions and operand.free_size == 1,
        "{} is {!r}; for {!r} it must have the shape ({}, 1).",
        role,
        operand,
        data,
        data.partitions,
    )
    require(any_dtype or operand.dtype is FLOAT32, "{} is {!r}; it must be float32.", role, operand)
    return [operand]


def arithmetic(operator: Operator, role: str, inputs: int = 2) -> Operator:
    """Check that `operator` is one of VectorE's arithmetic operators with that many inputs."""
    fits = operator.inputs == inputs and not operator.bitwise
    require(fits, "{}={!r} is no arithmetic operator of {} inputs.", role, operator, inputs)
    return operator


def float32(operand: Any) -> Any:
    """An operand as the engines compute with it: numbers as float32, tiles as float32 [partitions, elements]."""
    if not isinstance(operand, Tensor):
        return np.float32(operand)
    return operand.values.astype(np.float32, copy=False).reshape(operand.partitions, -1)


def bits(operand: Any, like: Tensor) -> Any:
    """An operand of a bitwise operator: integers, untouched."""
    if not isinstance(operand, Tensor):
        return like.dtype.numpy.type(operand)
    return operand.values.reshape(operand.partitions, -1)
