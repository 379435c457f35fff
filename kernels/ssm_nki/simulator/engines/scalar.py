"""ScalarE: a function of each element, op(data * scale + bias), with a sum over each partition beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ssm_nki.simulator.accumulator import ReduceCommand
from ssm_nki.simulator.errors import require
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.memory import Tensor
from ssm_nki.simulator.operands import Engine, column, float32, instruction, issue, same_shape
from ssm_nki.simulator.operators import OPERATORS, Operator


@instruction
def activation(
    dst: Tensor,
    op: Operator,
    data: Tensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Operator | None = None,
    reduce_res: Tensor | None = None,
    reduce_cmd: ReduceCommand = ReduceCommand.idle,
) -> None:
    """dst = op(data * scale + bias).

    `scale` is a number or a float32 tile (partitions, 1); `bias` a tile (partitions, 1) of any type (from gen3 also a
    number). `reduce_cmd` says whether the accumulators take the sum over each partition of the result; `reduce_res`
    receives them.
    """
    _activate("activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


@instruction
def activation_reduce(
    dst: Tensor,
    op: Operator,
    data: Tensor,
    reduce_op: Operator,
    reduce_res: Tensor | None,
    bias: Any = None,
    scale: Any = 1.0,
) -> None:
    """`activation` with reduce_cmd=reset_reduce: reduce_res is the sum over each partition of the result."""
    _activate("activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCommand.reset_reduce)


def _activate(
    name: str,
    dst: Tensor,
    op: Operator,
    data: Tensor,
    bias: Any,
    scale: Any,
    reduce_op: Operator | None,
    reduce_res: Tensor | None,
    reduce_cmd: ReduceCommand,
) -> None:
    machine = current()
    rules = machine.generation
    require(op.activation, "{!r} is no activation function.", op)
    same_shape(dst, data)
    reads = [data, *column(scale, data, "scale")]
    if bias is not None:
        number = not isinstance(bias, Tensor)
        require(not number or rules.bias_may_be_number, "bias={!r}: on {} it must be a tile.", bias, rules.name)
        refused = op.name == "reciprocal" and not rules.reciprocal_takes_bias
        require(not refused, "reciprocal takes no bias on {}.", rules.name)
        reads += column(bias, data, "bias", any_dtype=True)
    require(reduce_op in (None, OPERATORS["add"]), "reduce_op={!r}: ScalarE reduces by nl.add only.", reduce_op)
    require(reduce_cmd is not ReduceCommand.load_reduce, "ScalarE does not have reduce_cmd load_reduce.")
    reduces = reduce_cmd in (ReduceCommand.reduce, ReduceCommand.reset_reduce)
    require(not reduces or reduce_op is not None, "{} needs reduce_op=nl.add.", reduce_cmd)
    if reduce_res is not None:
        column(reduce_res, data, "reduce_res", any_dtype=True)

    def compute() -> Any:
        x = float32(data) * float32(scale)
        result = op.activate(x if bias is None else x + float32(bias))
        if reduce_cmd is not ReduceCommand.idle:
            total = result.sum(1, keepdims=True, dtype=np.float32) if reduces else 0 * result[:, :1]
            machine.scalar_accumulator.update(total, OPERATORS["add"], reduce_cmd)
        return result if reduce_res is None else (result, machine.scalar_accumulator.read(data.partitions))

    writes = [dst] if reduce_res is None else [dst, reduce_res]
    issue(name, Engine.scalar, writes, reads, compute, [op], [] if reduce_res is None else ["readout"])
