"""Each rule of the instructions, broken: the error names instruction and rule. Beside it, what is just legal."""

import ml_dtypes
import numpy as np
import pytest

from ssm_nki.simulator import Machine
from ssm_nki.simulator import isa as nisa
from ssm_nki.simulator import language as nl
from tests.kernels.rules import copy, matmul, refuses
from tests.kernels.tiles_of import empty, random, tile

bfloat16 = ml_dtypes.bfloat16


# TensorE


def test_sizes_of_a_matmul(gen2):
    a, b = random((64, 128)), random((64, 512))
    matmul(empty((128, 512), nl.psum), a, b)
    with refuses("differ in partitions"):
        matmul(empty((128, 512), nl.psum), a[0:32, 0:128], b)
    with refuses("stationary has 129 columns"):
        matmul(empty((128, 512), nl.psum), random((64, 129)), b)
    with refuses("moving has 513 columns; 512 at most"):
        matmul(empty((128, 513), nl.psum), a, random((64, 513)))
    with refuses("its shape must be \\(128, 512\\)"):
        matmul(empty((128, 256), nl.psum), a, b)


def test_gen4_takes_wider_moving_operands():
    with Machine("gen4").running():
        matmul(empty((16, 4096), nl.psum), random((8, 16)), random((8, 4096)))


def test_types_of_a_matmul(generation):
    narrow, full, whole = random((8, 8), dtype=bfloat16), random((8, 8)), tile(np.ones((8, 8)), dtype=np.int32)
    with refuses("bfloat16 with float32"):
        matmul(empty((8, 8), nl.psum), narrow, full)
    with refuses("floating-point"):
        matmul(empty((8, 8), nl.psum), whole, whole)
    rounded = empty((8, 8), nl.psum, bfloat16)
    if generation == "gen4":
        matmul(rounded, narrow, narrow)
    else:
        with refuses("must be float32"):
            matmul(rounded, narrow, narrow)


def test_a_product_lies_in_one_bank(gen2):
    a, b = random((8, 16)), random((8, 64))
    two_banks = empty((16, 1024), nl.psum)
    matmul(two_banks[0:16, 448:512], a, b)
    matmul(two_banks[0:16, 512:576], a, b)
    with refuses("more than one bank"):
        matmul(two_banks[0:16, 480:544], a, b)


def test_what_is_said_to_be_zeros_and_ones_is(gen2):
    dst, mask, other = empty((16, 16), nl.psum), tile(np.eye(16)), random((16, 16))
    matmul(dst, mask, other, is_stationary_onezero=True)
    matmul(dst, other, mask, is_moving_onezero=True)
    for hint in ("is_stationary_onezero", "is_moving_onezero"):
        with refuses("nc_matmul: .* is said to be onezero, and holds other numbers"):
            matmul(dst, other, other, **{hint: True})


def test_what_may_be_accumulated(generation):
    a, b = random((8, 16)), random((8, 64))
    filled, part = empty((16, 64), nl.psum), empty((16, 64), nl.psum)
    nisa.memset(dst=filled, value=0.0)
    if generation == "gen4":
        matmul(filled, a, b)
    else:
        with refuses("written by another engine"):
            matmul(filled, a, b)
        matmul(filled, a, b, accumulate=False)
        matmul(filled, a, b)
    matmul(part[0:16, 0:32], a, b[0:8, 0:32])
    with refuses("written in part"):
        matmul(part, a, b)
    with refuses("before anything was written"):
        matmul(empty((16, 64), nl.psum), a, b, accumulate=True)


def test_transpositions(generation):
    with refuses("too large for the vector engine"):
        nisa.nc_transpose(dst=empty((33, 8)), data=random((8, 33)), engine=nisa.engine.vector)
    with refuses("too large for the tensor engine"):
        nisa.nc_transpose(dst=empty((8, 129), nl.psum), data=random((128, 129)))
    with refuses("its shape must be \\(64, 8\\)"):
        nisa.nc_transpose(dst=empty((8, 64), nl.psum), data=random((8, 64)))
    with refuses("must have the type of data"):
        nisa.nc_transpose(dst=empty((64, 8), nl.psum), data=random((8, 64), dtype=bfloat16))
    narrow = {"dst": empty((64, 8), nl.psum, bfloat16), "data": random((8, 64), dtype=bfloat16)}
    if generation == "gen2":
        with refuses("TensorE of gen2 writes float32"):
            nisa.nc_transpose(**narrow)
    else:
        nisa.nc_transpose(**narrow)


# ScalarE


def test_bias(generation):
    data, column = random((4, 8)), random((4, 1), dtype=bfloat16)
    nisa.activation(dst=data, op=nl.exp, data=data, bias=column)
    positive = tile(np.ones((4, 8)))
    if generation == "gen2":
        with refuses("bias=0.5: on gen2 it must be a tile"):
            nisa.activation(dst=data, op=nl.exp, data=data, bias=0.5)
        with refuses("reciprocal takes no bias on gen2"):
            nisa.activation(dst=data, op=nl.reciprocal, data=positive, bias=column)
    else:
        nisa.activation(dst=data, op=nl.exp, data=data, bias=0.5)
        nisa.activation(dst=data, op=nl.reciprocal, data=positive, bias=column)


def test_parameters_of_an_activation(gen2):
    data = random((4, 8))
    with refuses("no activation function"):
        nisa.activation(dst=data, op=nl.add, data=data)
    with refuses("scale is .*bfloat16.*; it must be float32"):
        nisa.activation(dst=data, op=nl.exp, data=data, scale=random((4, 1), dtype=bfloat16))
    with refuses("the shape \\(4, 1\\)"):
        nisa.activation(dst=data, op=nl.exp, data=data, scale=random((4, 2)))
    with refuses("reduces by nl.add only"):
        nisa.activation(dst=data, op=nl.exp, data=data, reduce_op=nl.maximum)
    with refuses("needs reduce_op"):
        nisa.activation(dst=data, op=nl.exp, data=data, reduce_cmd=nisa.reduce_cmd.reduce)
    with refuses("load_reduce"):
        nisa.activation(dst=data, op=nl.exp, data=data, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.load_reduce)
    with refuses("read before they were reset"):
        nisa.activation(
            dst=data,
            op=nl.exp,
            data=data,
            reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reduce,
            reduce_res=empty((4, 1)),
        )


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("log", [2.0**-64, 2.0**64], [0.0, 2.0**-65, 2.0**65, -1.0]),
        ("sqrt", [2.0**-116, 2.0**118], [0.0, 2.0**119, -1.0]),
        ("rsqrt", [2.0**-87, 2.0**97], [0.0, 2.0**98]),
        ("reciprocal", [2.0**-42, -(2.0**42)], [0.0, 2.0**43, -(2.0**-43)]),
        ("sin", [-3.1415, 3.1415], [3.15, -3.15]),
        ("arctan", [-1.57, 1.57], [1.6, -1.6]),
        ("exp", [-1e30, 88.0, -np.inf], []),
    ],
)
def test_inputs_of_activation_functions(gen2, name, inside, outside):
    out = empty((1, 1))
    for x in inside:
        nisa.activation(dst=out, op=getattr(nl, name), data=tile([[x]]))
    for x in outside:
        with refuses(f"nl.{name} is defined on ScalarE"):
            nisa.activation(dst=out, op=getattr(nl, name), data=tile([[x]]))


def test_scalar_engine_copies_from_gen3_on(generation):
    data = random((4, 8))
    scaled = {"dst": data, "data": data, "op0": nl.multiply, "operand0": 2.0, "engine": nisa.engine.scalar}
    if generation == "gen2":
        with refuses("ScalarE has no tensor_copy on gen2"):
            nisa.tensor_copy(dst=data, src=data, engine=nisa.engine.scalar)
        with refuses("ScalarE has no tensor_scalar on gen2"):
            nisa.tensor_scalar(**scaled)
    else:
        nisa.tensor_copy(dst=data, src=data, engine=nisa.engine.scalar)
        nisa.tensor_scalar(**scaled)
        with refuses("multiply, add, or multiply then add"):
            nisa.tensor_scalar(**scaled | {"op0": nl.subtract})


# VectorE and GpSimd


def test_shapes_agree(gen2):
    with refuses("tensor_copy: Partitions or elements per partition differ"):
        copy(empty((4, 8)), random((4, 9)))
    with refuses("dma_copy: .*differ in size"):
        nisa.dma_copy(dst=empty((4, 8)), src=random((4, 9), nl.shared_hbm))
    copy(empty((4, 2, 4)), random((4, 8)))  # dimensions may be factored otherwise


def test_operands_of_tensor_scalar(gen2):
    data, whole = random((4, 8)), tile(np.ones((4, 8)), dtype=np.int32)
    with refuses("both be arithmetic or both bitwise"):
        nisa.tensor_scalar(dst=whole, data=whole, op0=nl.bitwise_and, operand0=1, op1=nl.add, operand1=1.0)
    with refuses("need integers"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.bitwise_and, operand0=1)
    with refuses("must be 0 or None with nl.abs"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.abs, operand0=1.0)
    with refuses("operand0 is .*it must be float32"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.add, operand0=random((4, 1), dtype=bfloat16))
    with refuses("operand0=None is neither a number nor a tile"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.add, operand0=None)
    with refuses("operand1 is given without op1"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.add, operand0=1.0, operand1=1.0)
    with refuses("nl.rsqrt only"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.add, operand0=1.0, engine=nisa.engine.gpsimd)
    with refuses("no arithmetic or bitwise operator"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.exp, operand0=0.0)
    with refuses("The tensor engine cannot do this"):
        nisa.tensor_scalar(dst=data, data=data, op0=nl.add, operand0=1.0, engine=nisa.engine.tensor)


def test_operators_of_other_instructions(gen2):
    data, whole = random((4, 8)), tile(np.ones((4, 8)), dtype=np.int32)
    with refuses("no operator of two inputs"):
        nisa.tensor_tensor(dst=data, data1=data, data2=data, op=nl.abs)
    with refuses("op=<ufunc 'add'> is no operator"):
        nisa.tensor_tensor(dst=data, data1=data, data2=data, op=np.add)
    with refuses("data1=1.0 is no tensor"):
        nisa.tensor_tensor(dst=data, data1=1.0, data2=data, op=nl.add)
    with refuses("missing a required argument: 'data2'"):
        nisa.tensor_tensor(dst=data, data1=data, op=nl.add)
    with refuses("nl.bitwise_or needs integers"):
        nisa.tensor_reduce(dst=empty((4, 1)), op=nl.bitwise_or, data=data, axis=1)
    with refuses("does not reduce over partitions"):
        nisa.tensor_partition_reduce(dst=empty((1, 8)), op=nl.multiply, data=data)
    with refuses("its shape must be \\(1, 8\\)"):
        nisa.tensor_partition_reduce(dst=empty((1, 7)), op=nl.add, data=data)
    with refuses("power runs on GpSimd only"):
        nisa.tensor_tensor(dst=data, data1=data, data2=data, op=nl.power, engine=nisa.engine.vector)
    with refuses("no arithmetic operator of 2 inputs"):
        nisa.scalar_tensor_tensor(dst=data, data=data, op0=nl.bitwise_or, operand0=1.0, op1=nl.add, operand1=data)
    with refuses("no operator that reduces"):
        nisa.tensor_reduce(dst=empty((4, 1)), op=nl.power, data=data, axis=1)
    with refuses("negate goes with arithmetic"):
        nisa.tensor_reduce(dst=empty((4, 1)), op=nl.bitwise_or, data=whole, axis=1, negate=True)
    with refuses("does not accumulate"):
        nisa.tensor_scalar_cumulative(dst=data, src=data, op0=nl.add, op1=nl.power, imm0=1.0)
    with refuses("32-bit integers"):
        nisa.tensor_scalar_cumulative(dst=whole, src=whole, op0=nl.add, op1=nl.add, imm0=1.0)
    with refuses("imm1 goes with load_reduce"):
        nisa.tensor_scalar_cumulative(dst=data, src=data, op0=nl.add, op1=nl.add, imm0=1.0, imm1=1.0)
    with refuses("no comparison"):
        nisa.affine_select(
            dst=data,
            pattern=[[1, 8]],
            offset=0,
            channel_multiplier=0,
            on_true_tile=data,
            on_false_value=0,
            cmp_op=nl.add,
        )


def test_accumulating_instructions(gen2):
    data, column = random((4, 8)), empty((4, 1))
    scaled = {"dst": data, "data": data, "op0": nl.multiply, "operand0": 2.0, "reduce_res": column}
    with refuses("reduce_op=nl.power does not reduce here"):
        nisa.tensor_scalar_reduce(**scaled, reduce_op=nl.power)
    with refuses("reverse0 is not supported"):
        nisa.tensor_scalar_reduce(**scaled, reduce_op=nl.add, reverse0=True)
    summed = {"dst": data, "src": data, "op0": nl.multiply, "op1": nl.add, "imm0": 1.0}
    with refuses("reduce_cmd must be reset_reduce, reduce or load_reduce"):
        nisa.tensor_scalar_cumulative(**summed, reduce_cmd=nisa.reduce_cmd.idle)
    with refuses("read before they were reset"):
        nisa.tensor_scalar_cumulative(**summed, reduce_cmd=nisa.reduce_cmd.reduce)


def test_axes_of_a_reduction(gen2):
    data = random((4, 3, 5))
    for axis in (0, 1, (0, 1, 2)):
        with refuses("only the last free dimensions"):
            nisa.tensor_reduce(dst=empty((4, 1)), op=nl.add, data=data, axis=axis)
    with refuses("leaves the shape \\(4, 3\\)"):
        nisa.tensor_reduce(dst=empty((4, 5)), op=nl.add, data=data, axis=2)


def test_patterns_and_predicates(gen2):
    data, predicate = random((4, 8)), tile(np.ones((4, 8)), dtype=np.uint8)
    with refuses("gives 7 elements"):
        nisa.iota(dst=data, pattern=[[1, 7]], offset=0)
    with refuses("one to four"):
        nisa.iota(dst=data, pattern=[[1, 1]] * 4 + [[1, 8]], offset=0)
    with refuses("predicate is .*float32"):
        nisa.tensor_copy_predicated(dst=data, src=data, predicate=data)
    with refuses("predicate is .*float32"):
        nisa.select_reduce(dst=data, predicate=data, on_true=data, on_false=0.0)
    with refuses("must have one type"):
        nisa.tensor_copy_predicated(dst=data, src=random((4, 8), dtype=bfloat16), predicate=predicate)
    with refuses("only nl.maximum"):
        nisa.select_reduce(dst=data, predicate=predicate, on_true=data, on_false=0.0, reduce_op=nl.add)
    selected = {"dst": data, "predicate": predicate, "on_true": data, "on_false": 0.0}
    with refuses("does not have reduce_cmd load_reduce"):
        nisa.select_reduce(**selected, reduce_cmd=nisa.reduce_cmd.load_reduce)
    with refuses("it must have 32"):
        nisa.nc_stream_shuffle(dst=data, src=data, shuffle_mask=[0] * 4)
    whole = random((128, 8))
    nisa.nc_stream_shuffle(dst=whole, src=whole[0:1, 0:8], shuffle_mask=[0] * 32)
    with refuses("must start at one of the partitions \\(0,\\)"):
        nisa.nc_stream_shuffle(dst=whole, src=whole[32:33, 0:8], shuffle_mask=[0] * 32)
    with refuses("takes partition 4"):
        nisa.nc_stream_shuffle(dst=data, src=data, shuffle_mask=[4] * 32)
    with refuses("differ in elements per partition"):
        nisa.nc_stream_shuffle(dst=data, src=random((4, 9)), shuffle_mask=[0] * 32)
    with refuses("it must have 6 elements"):
        nisa.bn_stats(dst=empty((4, 5)), data=data)
    with refuses("it must have 2 elements"):
        nisa.bn_aggr(dst=empty((4, 3)), data=random((4, 6)))
    with refuses("more than 512 elements"):
        nisa.bn_stats(dst=empty((4, 6)), data=random((4, 513)))
    with refuses("no whole number of triples"):
        nisa.bn_aggr(dst=empty((4, 2)), data=data)
    with refuses("value='1' is no number"):
        nisa.memset(dst=data, value="1")
    with refuses("value=1.5 is no whole number"):
        nisa.memset(dst=predicate, value=1.5)
