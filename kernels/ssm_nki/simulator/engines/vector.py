"""VectorE, element by element: copies, arithmetic on two tensors, on a tensor and scalars, scans, selections.

Arithmetic is done in float32 whatever the operands are; some instructions run on GpSimd or ScalarE as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ssm_nki.simulator.errors import require
from ssm_nki.simulator.generations import start_partitions
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.memory import Buffer, Tensor
from ssm_nki.simulator.operands import (
    Engine,
    arithmetic,
    bits,
    column,
    float32,
    instruction,
    issue,
    not_both_in_psum,
    pick,
    same_shape,
)
from ssm_nki.simulator.operators import Operator

_EXACT_INTEGERS = ("int32", "uint32")
_PREDICATES = ("uint8", "uint16", "uint32")
_SCALAR_ENGINE_PAIRS = (("multiply", "add"), ("multiply", None), ("add", None))


@instruction
def memset(dst: Tensor, value: Any, engine: Engine = Engine.unknown) -> None:
    """dst = value."""
    require(isinstance(value, int | float | np.number), "value={!r} is no number.", value)
    whole = float(value).is_integer() or not dst.dtype.is_integer
    require(whole, "value={!r} is no whole number, and dst is {!r}.", value, dst)
    options = ["zero"] if value == 0 else []
    chosen = pick(engine, Engine.vector, Engine.gpsimd)
    issue("memset", chosen, [dst], [], lambda: np.full(dst.shape, value), options=options)


@instruction
def tensor_copy(dst: Tensor, src: Tensor, engine: Engine = Engine.unknown) -> None:
    """dst = src: bit by bit where the types are the same, through float32 otherwise."""
    same_shape(dst, src)
    rules = current().generation
    chosen = pick(engine, Engine.vector, Engine.gpsimd, Engine.scalar)
    allowed = chosen is not Engine.scalar or rules.scalar_engine_copies
    require(allowed, "ScalarE has no tensor_copy on {}; use nisa.activation(op=nl.copy).", rules.name)
    exact = dst.dtype == src.dtype
    issue("tensor_copy", chosen, [dst], [src], lambda: src.values.copy() if exact else float32(src))


@instruction
def tensor_copy_predicated(dst: Tensor, src: Any, predicate: Tensor, reverse_pred: bool = False) -> None:
    """dst = src where predicate is not 0 (with reverse_pred: where it is 0); the rest of dst stays."""
    same_shape(dst, predicate)
    require(
        predicate.dtype.name in _PREDICATES, "predicate is {!r}; it must be {}.", predicate, " or ".join(_PREDICATES)
    )
    reads = [dst, predicate]
    if isinstance(src, Tensor):
        same_shape(dst, src)
        require(src.dtype == dst.dtype, "{!r} and {!r} must have one type.", src, dst)
        not_both_in_psum(src, predicate)
        reads.append(src)

    def compute() -> np.ndarray:
        new = src.values.reshape(dst.shape) if isinstance(src, Tensor) else dst.dtype.numpy.type(src)
        chosen = (predicate.values != 0) != reverse_pred
        return np.where(chosen.reshape(dst.shape), new, dst.values)

    issue("tensor_copy_predicated", Engine.vector, [dst], reads, compute)


@instruction
def tensor_tensor(dst: Tensor, data1: Tensor, data2: Tensor, op: Operator, engine: Engine = Engine.unknown) -> None:
    """dst = data1 op data2. power, and 32-bit integers in SBUF (exactly), go to GpSimd."""
    same_shape(dst, data1, data2)
    not_both_in_psum(data1, data2)
    tensors = (dst, data1, data2)
    require(op.inputs == 2, "op={!r} is no operator of two inputs.", op)
    exact = all(tensor.dtype.name in _EXACT_INTEGERS for tensor in tensors) and not op.bitwise
    on_gpsimd = op.name == "power" or (exact and all(tensor.buffer is Buffer.sbuf for tensor in tensors))
    chosen = pick(engine, *((Engine.gpsimd, Engine.vector) if on_gpsimd else (Engine.vector, Engine.gpsimd)))
    require(op.name != "power" or chosen is Engine.gpsimd, "nl.power runs on GpSimd only.")
    if op.bitwise:
        _check_integers(*tensors)
        issue("tensor_tensor", chosen, [dst], [data1, data2], lambda: op(bits(data1, dst), bits(data2, dst)), [op])
        return

    def compute() -> np.ndarray:
        if exact and chosen is Engine.gpsimd:
            return op(bits(data1, dst).astype(np.int64), bits(data2, dst).astype(np.int64))
        return op(float32(data1), float32(data2))

    issue("tensor_tensor", chosen, [dst], [data1, data2], compute, [op])


@instruction
def tensor_scalar(
    dst: Tensor,
    data: Tensor,
    op0: Operator,
    operand0: Any,
    reverse0: bool = False,
    op1: Operator | None = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
) -> None:
    """dst = (data op0 operand0) op1 operand1, operands being numbers or float32 tiles (partitions, 1).

    reverse0 and reverse1 swap the two sides of their operator; an operator of one input takes operand 0 or None.
    """
    same_shape(dst, data)
    require(op1 is not None or operand1 is None, "operand1 is given without op1.")
    stages = [(op0, operand0, reverse0, "0")] + ([(op1, operand1, reverse1, "1")] if op1 is not None else [])
    require(len({op.bitwise for op, *_ in stages}) == 1, "op0 and op1 must both be arithmetic or both bitwise.")
    reads = [data]
    for op, operand, _, place in stages:
        reads += _check_stage(op, operand, data, place)
    bitwise = op0.bitwise
    if bitwise:
        _check_integers(dst, data)
    chosen = pick(engine, Engine.vector, Engine.scalar, Engine.gpsimd)
    _check_tensor_scalar_engine(chosen, op0, op1)

    def compute() -> np.ndarray:
        x = bits(data, data) if bitwise else float32(data)
        for op, operand, reverse, _ in stages:
            if op.inputs == 1:
                x = op(x)
                continue
            y = bits(operand, data) if bitwise else float32(operand)
            x = op(y, x) if reverse else op(x, y)
        return x

    issue("tensor_scalar", chosen, [dst], reads, compute, [op0, op1])


def _check_stage(op: Operator, operand: Any, data: Tensor, place: str) -> list[Tensor]:
    require(isinstance(op, Operator) and op.inputs > 0, "op{}={!r} is no arithmetic or bitwise operator.", place, op)
    if op.inputs == 1:
        unused = operand is None or (not isinstance(operand, Tensor) and operand == 0)
        require(unused, "operand{} must be 0 or None with {!r}, which has one input.", place, op)
        return []
    return column(operand, data, f"operand{place}", any_dtype=op.bitwise)


def _check_tensor_scalar_engine(chosen: Engine, op0: Operator, op1: Operator | None) -> None:
    if chosen is Engine.gpsimd:
        require(op0.name == "rsqrt" and op1 is None, "GpSimd does tensor_scalar for nl.rsqrt only.")
    if chosen is Engine.scalar:
        rules = current().generation
        require(rules.scalar_engine_copies, "ScalarE has no tensor_scalar on {}; use nisa.activation.", rules.name)
        pair = (op0.name, op1.name if op1 is not None else None)
        require(pair in _SCALAR_ENGINE_PAIRS, "ScalarE does tensor_scalar for multiply, add, or multiply then add.")


def _check_integers(*tensors: Tensor) -> None:
    for tensor in tensors:
        require(tensor.dtype.is_integer, "{!r}: bitwise operators need integers.", tensor)


@instruction
def scalar_tensor_tensor(
    dst: Tensor,
    data: Tensor,
    op0: Operator,
    operand0: Any,
    op1: Operator,
    operand1: Tensor,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """dst = (data op0 operand0) op1 operand1: operand0 a number or a float32 tile (partitions, 1), operand1 a tile."""
    same_shape(dst, data, operand1)
    not_both_in_psum(data, operand1)
    arithmetic(op0, "op0")
    arithmetic(op1, "op1")
    reads = [data, *column(operand0, data, "operand0"), operand1]

    def compute() -> np.ndarray:
        x, y, z = float32(data), float32(operand0), float32(operand1)
        x = op0(y, x) if reverse0 else op0(x, y)
        return op1(z, x) if reverse1 else op1(x, z)

    issue("scalar_tensor_tensor", Engine.vector, [dst], reads, compute, [op0, op1])


@instruction
def tensor_tensor_scan(
    dst: Tensor,
    data0: Tensor,
    data1: Tensor,
    initial: Any,
    op0: Operator,
    op1: Operator,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """r[i] = op1(op0(data0[i], r[i-1]), data1[i]) along the elements of each partition, from r[-1] = initial.

    The carry is float32 whatever dst is. reverse0 and reverse1 swap the sides of an operator; they do not turn time.
    """
    same_shape(dst, data0, data1)
    not_both_in_psum(data0, data1)
    arithmetic(op0, "op0")
    arithmetic(op1, "op1")
    reads = [data0, data1, *column(initial, data0, "initial")]

    def compute() -> np.ndarray:
        a, b = np.ascontiguousarray(float32(data0).T), np.ascontiguousarray(float32(data1).T)  # [elements, partitions]
        carry = np.broadcast_to(np.ravel(float32(initial)), a.shape[1:])
        result = np.empty_like(a)
        for i in range(len(a)):
            carry = op0(carry, a[i]) if reverse0 else op0(a[i], carry)
            carry = op1(b[i], carry) if reverse1 else op1(carry, b[i])
            result[i] = carry
        return result.T

    issue("tensor_tensor_scan", Engine.vector, [dst], reads, compute, [op0, op1])


@instruction
def reciprocal(dst: Tensor, data: Tensor) -> None:
    """dst = 1 / data, more exact than ScalarE's and eight times slower."""
    same_shape(dst, data)
    issue("reciprocal", Engine.vector, [dst], [data], lambda: 1 / float32(data))


@instruction
def nc_stream_shuffle(dst: Tensor, src: Tensor, shuffle_mask: list[int]) -> None:
    """In each group of 32 partitions, dst[i] = src[shuffle_mask[i]]; 255 leaves dst[i] as it is."""
    require(dst.dtype == src.dtype, "{!r} and {!r} must have one type.", src, dst)
    require(dst.free_size == src.free_size, "{!r} and {!r} differ in elements per partition.", src, dst)
    require(len(shuffle_mask) == 32, "shuffle_mask has {} entries; it must have 32.", len(shuffle_mask))
    starts = start_partitions(max(dst.partitions, src.partitions))
    for tensor in (dst, src):
        require(tensor.start_partition in starts, "{!r} must start at one of the partitions {}.", tensor, starts)
    kept = 255
    moves = []  # (partition of dst, partition of src)
    for target in range(dst.partitions):
        quadrant, place = divmod(target, 32)
        if shuffle_mask[place] != kept:
            source = (32 * quadrant if src.partitions > 32 else 0) + shuffle_mask[place]
            require(source < src.partitions, "shuffle_mask takes partition {} of {!r}.", source, src)
            moves.append((target, source))

    def compute() -> np.ndarray:
        result = dst.values.reshape(dst.partitions, -1).copy()
        for target, source in moves:
            result[target] = src.values.reshape(src.partitions, -1)[source]
        return result

    reads = [src] if len(moves) == dst.partitions else [src, dst]
    issue("nc_stream_shuffle", Engine.vector, [dst], reads, compute)
