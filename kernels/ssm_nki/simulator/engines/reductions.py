"""VectorE along the elements of each partition: reductions, cumulative operations, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ssm_nki.simulator import generations
from ssm_nki.simulator.accumulator import NEUTRAL, ReduceCommand
from ssm_nki.simulator.errors import require
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.memory import Tensor
from ssm_nki.simulator.operands import (
    Engine,
    arithmetic,
    column,
    float32,
    instruction,
    issue,
    not_both_in_psum,
    same_shape,
)
from ssm_nki.simulator.operators import OPERATORS, Operator

_SELECTABLE = ("int8", "uint8", "int16", "uint16")
_NOT_CUMULATIVE = ("int32", "uint32")


def _reduce(operator: Operator, x: np.ndarray) -> np.ndarray:
    """`operator` over the last axis, which stays with size 1."""
    return operator.function.reduce(x, axis=-1, keepdims=True, dtype=x.dtype)  # type: ignore[attr-defined]


@instruction
def tensor_reduce(
    dst: Tensor, op: Operator, data: Tensor, axis: int | Sequence[int], negate: bool = False, keepdims: bool = False
) -> None:
    """dst = op over the last free dimensions of data, `axis` naming them; with `negate` times -1."""
    require(op.reduces, "op={!r} is no operator that reduces.", op)
    axes = tuple(sorted(item % data.ndim for item in ((axis,) if isinstance(axis, int) else axis)))
    last = tuple(range(data.ndim - len(axes), data.ndim))
    require(bool(axes) and axes == last and axes[0] > 0, "axis={}: only the last free dimensions can be reduced.", axis)
    kept = data.shape[: data.ndim - len(axes)]
    fits = dst.partitions == data.partitions and dst.size == int(np.prod(kept))
    require(fits, "dst is {!r}; reducing axis={} of {!r} leaves the shape {}.", dst, axis, data, kept)
    require(not negate or not op.bitwise, "negate goes with arithmetic operators only.")
    integers = data.dtype.is_integer and dst.dtype.is_integer
    require(not op.bitwise or integers, "{!r} needs integers.", op)

    def compute() -> np.ndarray:
        rows = data.values if op.bitwise else data.values.astype(np.float32)
        result = _reduce(op, rows.reshape(*kept, -1))
        return -result if negate else result

    issue("tensor_reduce", Engine.vector, [dst], [data], compute, [op])


@instruction
def tensor_scalar_reduce(
    dst: Tensor,
    data: Tensor,
    op0: Operator,
    operand0: Any,
    reduce_op: Operator,
    reduce_res: Tensor,
    reverse0: bool = False,
) -> None:
    """dst = data op0 operand0, and reduce_res = reduce_op over the elements of each partition of that."""
    same_shape(dst, data)
    arithmetic(op0, "op0")
    require(
        reduce_op.name in NEUTRAL and reduce_op.name != "subtract", "reduce_op={!r} does not reduce here.", reduce_op
    )
    column(reduce_res, data, "reduce_res", any_dtype=True)
    require(not reverse0, "reverse0 is not supported by any release.")
    reads = [data, *column(operand0, data, "operand0")]

    def compute() -> tuple[np.ndarray, np.ndarray]:
        result = op0(float32(data), float32(operand0))
        accumulator = current().vector_accumulator
        accumulator.update(_reduce(reduce_op, result), reduce_op, ReduceCommand.reset_reduce)
        return result, accumulator.read(data.partitions)

    issue("tensor_scalar_reduce", Engine.vector, [dst, reduce_res], reads, compute, [op0, reduce_op], ["readout"])


@instruction
def tensor_scalar_cumulative(
    dst: Tensor,
    src: Tensor,
    op0: Operator,
    op1: Operator,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: ReduceCommand = ReduceCommand.reset_reduce,
) -> None:
    """register = op1(op0(src[i], imm0), register); dst[i] = register, along the elements of each partition."""
    same_shape(dst, src)
    arithmetic(op0, "op0")
    require(op1.name in NEUTRAL, "op1={!r} does not accumulate.", op1)
    for tensor in (dst, src):
        require(tensor.dtype.name not in _NOT_CUMULATIVE, "{!r}: 32-bit integers do not accumulate.", tensor)
    accumulates = reduce_cmd in (ReduceCommand.reduce, ReduceCommand.reset_reduce, ReduceCommand.load_reduce)
    require(accumulates, "reduce_cmd must be reset_reduce, reduce or load_reduce, not {}.", reduce_cmd)
    require(
        (imm1 is not None) == (reduce_cmd is ReduceCommand.load_reduce), "imm1 goes with load_reduce, and only then."
    )
    reads = [src, *column(imm0, src, "imm0")] + ([] if imm1 is None else column(imm1, src, "imm1"))

    def compute() -> np.ndarray:
        accumulator = current().vector_accumulator
        accumulator.prepare(op1, reduce_cmd, None if imm1 is None else float32(imm1))
        terms = op0(float32(src), float32(imm0))
        result = np.empty_like(terms)
        register = accumulator.read(src.partitions)[:, 0]
        for i in range(terms.shape[1]):
            register = op1(terms[:, i], register)
            result[:, i] = register
        accumulator.store(register[:, None])
        return result

    issue("tensor_scalar_cumulative", Engine.vector, [dst], reads, compute, [op0, op1])


@instruction
def select_reduce(
    dst: Tensor,
    predicate: Tensor,
    on_true: Tensor,
    on_false: Any,
    reduce_res: Tensor | None = None,
    reduce_cmd: ReduceCommand = ReduceCommand.idle,
    reduce_op: Operator = OPERATORS["maximum"],
    reverse_pred: bool = False,
) -> None:
    """dst = on_true where predicate is not 0, else on_false, a number or a tile (partitions, 1)."""
    same_shape(dst, predicate, on_true)
    not_both_in_psum(on_true, predicate)
    require(predicate.dtype.name in _SELECTABLE, "predicate is {!r}; it must be {}.", predicate, ", ".join(_SELECTABLE))
    require(reduce_op is OPERATORS["maximum"], "reduce_op={!r}: only nl.maximum reduces here.", reduce_op)
    require(reduce_cmd is not ReduceCommand.load_reduce, "select_reduce does not have reduce_cmd load_reduce.")
    reads = [predicate, on_true, *column(on_false, on_true, "on_false")]
    if reduce_res is not None:
        column(reduce_res, on_true, "reduce_res", any_dtype=True)

    def compute() -> Any:
        chosen = (predicate.values.reshape(predicate.partitions, -1) != 0) != reverse_pred
        result = np.where(chosen, float32(on_true), float32(on_false))
        accumulator = current().vector_accumulator
        if reduce_cmd is not ReduceCommand.idle:
            accumulator.update(_reduce(reduce_op, result), reduce_op, reduce_cmd)
        return result if reduce_res is None else (result, accumulator.read(on_true.partitions))

    writes = [dst] if reduce_res is None else [dst, reduce_res]
    issue("select_reduce", Engine.vector, writes, reads, compute, options=["readout"])


@instruction
def bn_stats(dst: Tensor, data: Tensor) -> None:
    """dst[P, 6] = (count, mean, variance * count) of the even, then of the odd elements of each partition."""
    limit = generations.BN_STATS_LIMIT
    require(data.free_size <= limit, "{!r} has more than {} elements per partition.", data, limit)
    require((dst.partitions, dst.free_size) == (data.partitions, 6), "dst is {!r}; it must have 6 elements.", dst)

    def compute() -> np.ndarray:
        parts = []
        for half in (float32(data)[:, 0::2], float32(data)[:, 1::2]):
            count = np.full((data.partitions, 1), half.shape[1], np.float32)
            mean = half.mean(1, keepdims=True) if half.shape[1] else 0 * count
            parts += [count, mean, np.square(half - mean).sum(1, keepdims=True)]
        return np.concatenate(parts, 1)

    issue("bn_stats", Engine.vector, [dst], [data], compute)


@instruction
def bn_aggr(dst: Tensor, data: Tensor) -> None:
    """dst[P, 2] = (mean, variance) from the triples (count, mean, variance * count) of `bn_stats`."""
    require(data.free_size % 3 == 0, "{!r} holds no whole number of triples.", data)
    require((dst.partitions, dst.free_size) == (data.partitions, 2), "dst is {!r}; it must have 2 elements.", dst)

    def compute() -> np.ndarray:
        count, mean, squares = np.moveaxis(float32(data).reshape(data.partitions, -1, 3), 2, 0)
        total = count.sum(1, keepdims=True)
        average = (count * mean).sum(1, keepdims=True) / total
        variance = (squares + count * np.square(mean - average)).sum(1, keepdims=True) / total
        return np.concatenate([average, variance], 1)

    issue("bn_aggr", Engine.vector, [dst], [data], compute)
