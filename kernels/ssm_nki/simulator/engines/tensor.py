"""TensorE: a systolic array of 128 x 128 that multiplies and transposes; it reads SBUF and writes PSUM."""

from __future__ import annotations

from typing import Any

import numpy as np

from ssm_nki.simulator import generations
from ssm_nki.simulator.dtypes import FLOAT32, TFLOAT32
from ssm_nki.simulator.errors import UnsupportedError, require
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.memory import ACCUMULATED, UNWRITTEN, WRITTEN, Tensor
from ssm_nki.simulator.operands import Engine, float32, instruction, issue, pick

_WIDE = (FLOAT32, TFLOAT32)


@instruction
def nc_matmul(
    dst: Tensor,
    stationary: Tensor,
    moving: Tensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple = (),
    tile_size: tuple = (),
    perf_mode: Any = None,
) -> None:
    """dst[M, N] = stationary[K, M]^T @ moving[K, N], or added to dst where a matmul has written it before.

    The sums are float32. `accumulate` says what the default infers: the first matmul overwrites, later ones add.
    is_stationary_onezero and is_moving_onezero: TensorE may take it that the operand holds only zeros and ones.
    """
    for name, value in {"tile_position": tile_position, "tile_size": tile_size}.items():
        if value:
            raise UnsupportedError(f"The simulator does not have {name}.")
    if getattr(perf_mode, "name", "none") != "none":
        raise UnsupportedError(f"The simulator does not have perf_mode={perf_mode}.")
    _check_matmul(dst, stationary, moving, is_transpose)
    adds = _adds(dst, accumulate)
    hinted = [tensor for tensor, hint in ((stationary, is_stationary_onezero), (moving, is_moving_onezero)) if hint]

    def product() -> np.ndarray:
        for tensor in hinted:
            exact = ((tensor.values == 0) | (tensor.values == 1)).all()
            require(bool(exact), "{!r} is said to be onezero, and holds other numbers than 0 and 1.", tensor)
        result = float32(stationary).T @ float32(moving)  # [M, N]
        return result + float32(dst) if adds else result

    issue(
        "nc_matmul",
        Engine.tensor,
        [dst],
        [stationary, moving],
        product,
        options=["one_zero"] if hinted else [],
        state=ACCUMULATED,
    )


def _check_matmul(dst: Tensor, stationary: Tensor, moving: Tensor, is_transpose: bool) -> None:
    rules = current().generation
    rows, columns = stationary.free_size, moving.free_size
    require(stationary.partitions == moving.partitions, "{!r} and {!r} differ in partitions (K).", stationary, moving)
    require(rows <= generations.STATIONARY_LIMIT, "stationary has {} columns; 128 at most.", rows)
    require(columns <= rules.moving_limit, "moving has {} columns; {} at most.", columns, rules.moving_limit)
    require(
        (dst.partitions, dst.free_size) == (rows, columns),
        "dst is {!r}; its shape must be ({}, {}).",
        dst,
        rows,
        columns,
    )
    for operand in (stationary, moving):
        require(not operand.dtype.is_integer, "{!r}: TensorE multiplies floating-point numbers.", operand)
    mixed = (stationary.dtype in _WIDE) != (moving.dtype in _WIDE)
    require(not mixed, "{} with {}: float32 and tfloat32 go only with each other.", stationary.dtype, moving.dtype)
    outputs = (stationary.dtype.name,) if is_transpose and rules.transpose_mode else rules.matmul_outputs
    require(dst.dtype.name in outputs, "dst is {!r}; on {} it must be {}.", dst, rules.name, " or ".join(outputs))
    if rules.moving_limit * FLOAT32.itemsize <= generations.PSUM_BANK_BYTES:
        _check_one_bank(dst)


def _check_one_bank(dst: Tensor) -> None:
    """The output must lie within one bank; an allocation above one bank starts at the start of a bank."""
    first = dst.offset % dst.storage.free_elements
    last = first + sum(stride * (count - 1) for stride, count in dst.access_pattern)
    bank = generations.PSUM_BANK_BYTES // dst.dtype.itemsize
    require(first // bank == last // bank, "{!r} lies in more than one bank of PSUM.", dst)


def _adds(dst: Tensor, accumulate: bool | None) -> bool:
    if accumulate is False:
        return False
    rules = current().generation
    least, most = int(dst.state.min()), int(dst.state.max())
    if most == UNWRITTEN:
        require(accumulate is None, "{!r} is accumulated to before anything was written.", dst)
        return False
    require(least != UNWRITTEN, "{!r} was written in part only, so it is neither a first result nor a sum.", dst)
    require(
        least != WRITTEN or rules.accumulate_over_values,
        "{!r} was written by another engine than TensorE; adding to that is undefined on {}.",
        dst,
        rules.name,
    )
    return True


@instruction
def nc_transpose(dst: Tensor, data: Tensor, engine: Engine = Engine.unknown) -> None:
    """dst[F, P] = data[P, F]^T, on VectorE up to 32 x 32, on TensorE up to 128 x 128 from SBUF to PSUM."""
    small = max(data.partitions, data.free_size) <= generations.VECTOR_TRANSPOSE_LIMIT
    chosen = pick(engine, *((Engine.vector, Engine.tensor) if small else (Engine.tensor, Engine.vector)))
    limit = generations.VECTOR_TRANSPOSE_LIMIT if chosen is Engine.vector else generations.STATIONARY_LIMIT
    fits = max(data.partitions, data.free_size) <= limit
    require(
        fits, "{!r} is too large for the {} engine, which transposes {} x {} at most.", data, chosen.name, limit, limit
    )
    fits = (dst.partitions, dst.free_size) == (data.free_size, data.partitions)
    require(fits, "dst is {!r}; its shape must be ({}, {}).", dst, data.free_size, data.partitions)
    require(dst.dtype == data.dtype, "dst is {!r}; it must have the type of data, {}.", dst, data.dtype)
    rules = current().generation
    require(
        chosen is Engine.vector or rules.transpose_mode or dst.dtype is FLOAT32,
        "TensorE of {} writes float32: transpose {!r} by nc_matmul(stationary=data, moving=identity).",
        rules.name,
        data,
    )
    issue("nc_transpose", chosen, [dst], [data], lambda: data.values.reshape(data.partitions, -1).T)
