"""What each instruction computes, against NumPy in float64."""

import ml_dtypes
import numpy as np
import pytest

from ssm_nki.simulator import isa as nisa
from ssm_nki.simulator import language as nl
from ssm_nki.simulator.dtypes import BFLOAT16, DTYPES, TFLOAT32, cast
from ssm_nki.simulator.operators import OPERATORS
from tests.kernels.tiles_of import empty, random, tile, wide

pytestmark = pytest.mark.usefixtures("generation")
bfloat16 = ml_dtypes.bfloat16


def near(tensor, expected, tolerance=1e-6):
    expected = np.asarray(expected, np.float64)
    error = np.abs(wide(tensor).reshape(expected.shape) - expected).max()
    assert error <= tolerance * max(1.0, np.abs(expected).max())


def test_dma_copy_moves_and_casts():
    source = random((4, 6, 8), nl.shared_hbm)
    rows = empty((6, 8), dtype=bfloat16)
    nisa.dma_copy(dst=rows, src=source[2])
    assert (rows.values == source.values[2].astype(bfloat16)).all()
    back = empty((48,), nl.shared_hbm, bfloat16)
    nisa.dma_copy(dst=back, src=rows)
    assert (back.values == rows.values.reshape(-1)).all()


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.int32])
def test_memset(dtype):
    filled = empty((8, 4), dtype=dtype)
    nisa.memset(dst=filled, value=3.0)
    assert (filled.values == 3).all()


def test_tensor_copy_keeps_bits_of_one_type():
    numbers = tile([[2**24 + 1, -7]], dtype=np.int32)
    exact = empty((1, 2), dtype=np.int32)
    nisa.tensor_copy(dst=exact, src=numbers)
    assert exact.values.tolist() == [[2**24 + 1, -7]]
    rounded = empty((1, 2))
    nisa.tensor_copy(dst=rounded, src=numbers)
    assert rounded.values.tolist() == [[2**24, -7]]


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_matmul_sums_in_float32(dtype):
    stationary, moving = random((128, 64), dtype=dtype), random((128, 256), dtype=dtype, seed=1)
    product = empty((64, 256), nl.psum)
    nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)
    near(product, wide(stationary).T @ wide(moving))


def test_first_matmul_overwrites_and_later_ones_add():
    a, b = random((32, 16)), random((32, 24), seed=1)
    both = empty((16, 48), nl.psum)
    nisa.nc_matmul(dst=both[0:16, 0:24], stationary=a, moving=b)
    nisa.nc_matmul(dst=both[0:16, 24:48], stationary=a, moving=b)
    nisa.nc_matmul(dst=both[0:16, 0:24], stationary=a, moving=b)
    once = wide(a).T @ wide(b)
    near(both, np.concatenate([2 * once, once], 1))


def test_explicit_accumulate():
    a, b = random((32, 16)), random((32, 24), seed=1)
    product = empty((16, 24), nl.psum)
    for accumulate in (False, True, False, True):
        nisa.nc_matmul(dst=product, stationary=a, moving=b, accumulate=accumulate)
    near(product, 2 * wide(a).T @ wide(b))


@pytest.mark.parametrize("shape", [(32, 20), (128, 100), (5, 128)])
def test_transpose(shape):
    data = random(shape)
    turned = empty(shape[::-1], nl.psum)
    nisa.nc_transpose(dst=turned, data=data)
    assert (turned.values == data.values.T).all()


def test_vector_transpose_keeps_any_type():
    data = random((32, 8), dtype=bfloat16)
    turned = empty((8, 32), dtype=bfloat16)
    nisa.nc_transpose(dst=turned, data=data, engine=nisa.engine.vector)
    assert (turned.values == data.values.T).all()


ACTIVATIONS = sorted(name for name, operator in OPERATORS.items() if operator.activation)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    expected = {
        "copy": lambda x: x,
        "reciprocal": lambda x: 1 / x,
        "silu": functional.silu,
        "softplus": functional.softplus,
        "mish": functional.mish,
        "gelu": functional.gelu,
        "gelu_apprx_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "gelu_apprx_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
        "arctan": torch.atan,
    }
    derivatives = {"silu_dx": "silu", "gelu_dx": "gelu", "gelu_apprx_sigmoid_dx": "gelu_apprx_sigmoid"}
    data = np.random.default_rng(0).uniform(0.1, 1.5, (8, 16)).astype(np.float32)
    x = torch.tensor(data, dtype=torch.float64, requires_grad=True)
    if name in derivatives or name == "erf_dx":
        function = torch.erf if name == "erf_dx" else expected[derivatives[name]]
        (result,) = torch.autograd.grad(function(x).sum(), x)
    else:
        result = expected.get(name) or getattr(torch, name)
        result = result(x).detach()
    out = empty((8, 16))
    nisa.activation(dst=out, op=getattr(nl, name), data=tile(data))
    near(out, result.numpy(), 1e-5)


def test_activation_scales_then_shifts_and_sums():
    data, scale, bias = random((16, 20)), random((16, 1), seed=1), random((16, 1), seed=2)
    out, sums = empty((16, 20), dtype=bfloat16), empty((16, 1))
    parameters = {"op": nl.tanh, "data": data, "scale": scale, "bias": bias}
    nisa.activation_reduce(dst=out, reduce_op=nl.add, reduce_res=sums, **parameters)
    expected = np.tanh(wide(data) * wide(scale) + wide(bias))
    near(out, expected, 4e-3)
    near(sums, expected.sum(1, keepdims=True))
    more = {"reduce_op": nl.add, "reduce_res": sums, "reduce_cmd": nisa.reduce_cmd.reduce}
    nisa.activation(dst=out, **parameters, **more)  # goes on summing
    near(sums, 2 * expected.sum(1, keepdims=True))


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}


@pytest.mark.parametrize("name", BINARY)
def test_tensor_tensor(name):
    first = tile([[0.0, 1.0, 2.5, -1.0]])
    second = tile([[0.0, 2.0, 2.5, 0.0]], nl.psum)
    out = empty((1, 4))
    nisa.tensor_tensor(dst=out, data1=first, data2=second, op=getattr(nl, name))
    near(out, BINARY[name](first.values, second.values))


def test_tensor_tensor_of_integers_is_exact_on_gpsimd_only():
    first, second = (tile([[2**24 + 1]], dtype=np.int32) for _ in range(2))
    out = empty((1, 1), dtype=np.int32)
    nisa.tensor_tensor(dst=out, data1=first, data2=second, op=nl.add)
    assert out.values.item() == 2**25 + 2
    nisa.tensor_tensor(dst=out, data1=first, data2=second, op=nl.add, engine=nisa.engine.vector)
    assert out.values.item() == 2**25


def test_power_and_bitwise():
    out = empty((1, 2))
    nisa.tensor_tensor(dst=out, data1=tile([[2.0, 9.0]]), data2=tile([[3.0, 0.5]]), op=nl.power)
    near(out, [[8.0, 3.0]])
    bits = empty((1, 2), dtype=np.uint8)
    masks = tile([[5, 255]], dtype=np.uint8), tile([[4, 15]], dtype=np.uint8)
    nisa.tensor_tensor(dst=bits, data1=masks[0], data2=masks[1], op=nl.bitwise_xor)
    assert bits.values.tolist() == [[1, 240]]
    nisa.tensor_scalar(dst=bits, data=masks[0], op0=nl.left_shift, operand0=1, op1=nl.bitwise_and, operand1=12)
    assert bits.values.tolist() == [[8, 12]]
    nisa.tensor_scalar(dst=bits, data=masks[0], op0=nl.invert, operand0=None)
    assert bits.values.tolist() == [[250, 0]]


def test_tensor_scalar_both_stages_reversed_or_not():
    data, column = random((8, 12)), random((8, 1), seed=1)
    out = empty((8, 12))
    stages = {"op0": nl.subtract, "operand0": column, "op1": nl.subtract, "operand1": 2.0}
    nisa.tensor_scalar(dst=out, data=data, **stages)
    near(out, wide(data) - wide(column) - 2)
    nisa.tensor_scalar(dst=out, data=data, **stages, reverse0=True, reverse1=True)
    near(out, 2 - (wide(column) - wide(data)))
    nisa.tensor_scalar(dst=out, data=data, op0=nl.abs, operand0=0.0)
    near(out, np.abs(wide(data)))


def test_scalar_tensor_tensor_both_stages_reversed_or_not():
    data, column, other = random((8, 12)), random((8, 1), seed=1), random((8, 12), nl.psum, seed=2)
    out = empty((8, 12), nl.psum)
    stages = {"op0": nl.subtract, "operand0": column, "op1": nl.subtract, "operand1": other}
    nisa.scalar_tensor_tensor(dst=out, data=data, **stages)
    near(out, wide(data) - wide(column) - wide(other))
    nisa.scalar_tensor_tensor(dst=out, data=data, **stages, reverse0=True, reverse1=True)
    near(out, wide(other) - (wide(column) - wide(data)))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse):
    a, b, initial = random((8, 20)), random((8, 20), seed=1), random((8, 1), seed=2)
    out = empty((8, 20), dtype=bfloat16)
    operators = {"op0": nl.multiply, "op1": nl.subtract, "reverse1": reverse}
    nisa.tensor_tensor_scan(dst=out, data0=a, data1=b, initial=initial, **operators)
    carry, expected = wide(initial)[:, 0], []
    for i in range(20):
        term = wide(a)[:, i] * carry
        carry = wide(b)[:, i] - term if reverse else term - wide(b)[:, i]
        expected.append(carry)
    near(out, np.stack(expected, 1), 4e-3)  # dst is rounded, the carry is not


@pytest.mark.parametrize(("axis", "shape"), [(2, (4, 6)), ((1, 2), (4, 1))])
@pytest.mark.parametrize("name", ["add", "maximum", "multiply"])
def test_tensor_reduce(axis, shape, name):
    data = random((4, 6, 5))
    out = empty(shape)
    nisa.tensor_reduce(dst=out, op=getattr(nl, name), data=data, axis=axis, negate=True)
    function = {"add": np.sum, "maximum": np.max, "multiply": np.prod}[name]
    near(out, -function(data.values.astype(np.float64), axis=axis).reshape(shape))


def test_tensor_scalar_reduce():
    data, out, total = random((4, 9)), empty((4, 9)), empty((4, 1))
    nisa.tensor_scalar_reduce(dst=out, data=data, op0=nl.multiply, operand0=3.0, reduce_op=nl.maximum, reduce_res=total)
    near(out, 3 * wide(data))
    near(total, 3 * wide(data).max(1, keepdims=True))


def test_tensor_scalar_cumulative_goes_on_and_starts_anew():
    source, out = random((4, 6)), empty((4, 6))
    stages = {"op0": nl.multiply, "op1": nl.add, "imm0": 2.0}
    nisa.tensor_scalar_cumulative(dst=out, src=source, **stages)
    sums = 2 * wide(source).cumsum(1)
    near(out, sums)
    nisa.tensor_scalar_cumulative(dst=out, src=source, **stages, reduce_cmd=nisa.reduce_cmd.reduce)
    near(out, sums + sums[:, -1:])
    nisa.tensor_scalar_cumulative(dst=out, src=source, **stages, reduce_cmd=nisa.reduce_cmd.load_reduce, imm1=5.0)
    near(out, sums + 5)


def test_selections():
    predicate = tile([[1, 0, 2, 0]], dtype=np.uint8)
    data, out, largest = tile([[1.0, 2.0, 3.0, 4.0]]), empty((1, 4)), empty((1, 1))
    nisa.select_reduce(
        dst=out,
        predicate=predicate,
        on_true=data,
        on_false=-1.0,
        reduce_res=largest,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    assert out.values.tolist() == [[1.0, -1.0, 3.0, -1.0]]
    assert largest.values.item() == 3
    nisa.tensor_copy_predicated(dst=out, src=data, predicate=predicate, reverse_pred=True)
    assert out.values.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    nisa.tensor_copy_predicated(dst=out, src=0.0, predicate=predicate)
    assert out.values.tolist() == [[0.0, 2.0, 0.0, 4.0]]


def test_reciprocal():
    data, out = tile([[4.0, -0.5]]), empty((1, 2))
    nisa.reciprocal(dst=out, data=data)
    assert out.values.tolist() == [[0.25, -2.0]]


def test_stream_shuffle_within_quadrants():
    data, out = random((64, 3)), random((64, 3), seed=1)
    before = out.values.copy()
    nisa.nc_stream_shuffle(dst=out, src=data, shuffle_mask=[31 - i for i in range(31)] + [255])
    for first in (0, 32):
        assert (out.values[first : first + 31] == data.values[first : first + 32][::-1][:31]).all()
        assert (out.values[first + 31] == before[first + 31]).all()
    nisa.nc_stream_shuffle(dst=out[0:32, 0:3], src=data[32:33, 0:3], shuffle_mask=[0] * 32)
    assert (out.values[0:32] == data.values[32]).all()


def test_statistics():
    data, halves, result = random((4, 33)), empty((4, 6)), empty((4, 2))
    nisa.bn_stats(dst=halves, data=data)
    nisa.bn_aggr(dst=result, data=halves)
    near(result, np.stack([wide(data).mean(1), wide(data).var(1)], 1))


def test_iota_and_affine_select():
    numbers = empty((3, 2, 4), dtype=np.int32)
    nisa.iota(dst=numbers, pattern=[[10, 2], [1, 4]], offset=5, channel_multiplier=100)
    partition, outer, inner = np.ogrid[0:3, 0:2, 0:4]
    assert (numbers.values == 5 + 100 * partition + 10 * outer + inner).all()
    data, out = random((6, 6)), empty((6, 6))
    nisa.affine_select(
        dst=out,
        pattern=[[-1, 6]],
        offset=0,
        channel_multiplier=1,
        on_true_tile=data,
        on_false_value=-9.0,
        cmp_op=nl.greater_equal,
    )
    near(out, np.where(np.tri(6) > 0, wide(data), -9))


def test_partition_reduce():
    data, out = random((9, 5)), empty((1, 5))
    nisa.tensor_partition_reduce(dst=out, op=nl.add, data=data)
    near(out, wide(data).sum(0, keepdims=True))


def test_integers_saturate_and_round_to_even():
    out = empty((1, 4), dtype=np.int8)
    nisa.tensor_copy(dst=out, src=tile([[0.5, 1.5, 300.0, -300.0]]))
    assert out.values.tolist() == [[0, 2, 127, -128]]


def test_tfloat32_keeps_ten_bits():
    x = np.float32([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -3.0, np.inf])
    assert cast(x, TFLOAT32).tolist() == [1 + 2**-10, 1.0, 1 + 2**-9, -3.0, np.inf]
    assert DTYPES["tfloat32"].itemsize == 4


def test_bfloat16_rounds_to_nearest_even():
    x = np.float32([1 + 2**-8, 1 + 3 * 2**-8])
    assert cast(x, BFLOAT16).astype(np.float32).tolist() == [1.0, 1 + 2**-6]
