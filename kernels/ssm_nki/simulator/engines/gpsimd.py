"""GpSimd: constants and selections by the position of an element, and reductions over partitions; it works in SBUF."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssm_nki.simulator.errors import require
from ssm_nki.simulator.memory import Tensor
from ssm_nki.simulator.operands import Engine, float32, instruction, issue, same_shape
from ssm_nki.simulator.operators import OPERATORS, Operator

_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
_OVER_PARTITIONS = ("add", "maximum", "bitwise_or", "bitwise_and")


def _affine(dst: Tensor, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int) -> np.ndarray:
    """offset + partition * channel_multiplier + sum of index_k * step_k, [partitions, elements]."""
    require(1 <= len(pattern) <= 4, "pattern={} must have one to four [step, count].", pattern)
    values = np.zeros(1, np.int64)
    for step, count in pattern:
        values = (values[:, None] + step * np.arange(count)).reshape(-1)
    require(values.size == dst.free_size, "pattern={} gives {} elements, and dst is {!r}.", pattern, values.size, dst)
    return offset + channel_multiplier * np.arange(dst.partitions)[:, None] + values


@instruction
def iota(dst: Tensor, pattern: Sequence[Sequence[int]], offset: int = 0, channel_multiplier: int = 0) -> None:
    """dst[p, i, j, ...] = offset + p * channel_multiplier + i * step_0 + j * step_1, pattern = [[step, count], ...]."""
    values = _affine(dst, pattern, offset, channel_multiplier)
    issue("iota", Engine.gpsimd, [dst], [], lambda: values)


@instruction
def affine_select(
    dst: Tensor,
    pattern: Sequence[Sequence[int]],
    *,
    channel_multiplier: int,
    on_true_tile: Tensor,
    on_false_value: float,
    cmp_op: Operator = OPERATORS["equal"],
    offset: int = 0,
) -> None:
    """dst = on_true_tile where cmp_op(value of `iota` there, 0), else on_false_value.

    The order of the later parameters differs between releases, so they are named.
    """
    same_shape(dst, on_true_tile)
    require(cmp_op.name in _COMPARISONS, "cmp_op={!r} is no comparison.", cmp_op)
    values = _affine(dst, pattern, offset, channel_multiplier)

    def compute() -> np.ndarray:
        return np.where(cmp_op(values, np.zeros_like(values)) > 0, float32(on_true_tile), np.float32(on_false_value))

    issue("affine_select", Engine.gpsimd, [dst], [on_true_tile], compute)


@instruction
def tensor_partition_reduce(dst: Tensor, op: Operator, data: Tensor) -> None:
    """dst[1, N] = op over the partitions of data; slow: a matmul with ones does the same on TensorE."""
    require(op.name in _OVER_PARTITIONS, "op={!r} does not reduce over partitions.", op)
    fits = (dst.partitions, dst.free_size) == (1, data.free_size)
    require(fits, "dst is {!r}; its shape must be (1, {}).", dst, data.free_size)

    def compute() -> np.ndarray:
        rows = data.values.reshape(data.partitions, -1) if op.bitwise else float32(data)
        return op.function.reduce(rows, axis=0)  # type: ignore[attr-defined]

    issue("tensor_partition_reduce", Engine.gpsimd, [dst], [data], compute, [op])
