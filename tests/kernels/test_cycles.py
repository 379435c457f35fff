"""The cost model, frozen: each formula, both shared ports, and the published profiles that calibrate it.

Kernels are tuned against this model, so it does not change with them. Expected cycles are written out as numbers.
"""

import ml_dtypes
import numpy as np
import pytest

from ssm_nki import cycles
from ssm_nki.simulator import KernelError, Machine
from ssm_nki.simulator import isa as nisa
from ssm_nki.simulator import language as nl
from tests.kernels.fused_mamba import channels_outer, states_outer
from tests.kernels.tiles_of import empty, random, tile

bfloat16 = ml_dtypes.bfloat16
TRN1, TRN2 = cycles.TARGETS["gen2"], cycles.TARGETS["gen3"]


def narrow(shape, buffer=nl.sbuf):
    return random(shape, buffer, bfloat16)


def psum(shape, dtype=np.float32):
    return random(shape, nl.psum, dtype)


def matmul(stationary, moving, **hints):
    dst = empty((stationary.shape[1], moving.shape[1]), nl.psum)
    nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, **hints)


def transpose(data, dst):
    nisa.nc_transpose(dst=dst, data=data)


def add(dst, a, b, op=nl.add, **options):
    nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=op, **options)


def scale(dst, data, **options):
    nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=2.0, op1=nl.add, operand1=1.0, **options)


def scalar_tensor(dst, data, other, op0=nl.multiply):
    nisa.scalar_tensor_tensor(dst=dst, data=data, op0=op0, operand0=2.0, op1=nl.multiply, operand1=other)


def scan(dst, a, b):
    nisa.tensor_tensor_scan(dst=dst, data0=a, data1=b, initial=0.0, op0=nl.multiply, op1=nl.add)


def reduce(dst, data, op=nl.add):
    nisa.tensor_reduce(dst=dst, op=op, data=data, axis=1)


def activate(data, **options):
    nisa.activation(dst=empty(data.shape), op=nl.exp, data=data, **options)


def predicated(src, predicate):
    nisa.tensor_copy_predicated(dst=random(predicate.shape), src=src, predicate=predicate)


def bits(shape, buffer=nl.sbuf):
    return tile(np.ones(shape), buffer, np.uint8)


def integers(shape):
    return tile(np.ones(shape), dtype=np.int32)


def positive(shape):
    return tile(np.ones(shape))


SUM = {"reduce_op": nl.add, "reduce_cmd": nisa.reduce_cmd.reset_reduce}
# name: (instruction, engine, cycles on trn1 and on trn2, without the fixed ones)
FORMULAS = {
    "matmul bfloat16": (lambda: matmul(narrow((128, 128)), narrow((128, 512))), "tensor", 512, 512),
    "matmul few columns": (lambda: matmul(narrow((128, 128)), narrow((128, 8))), "tensor", 64, 64),
    "matmul few columns and rows": (lambda: matmul(narrow((128, 16)), narrow((128, 8))), "tensor", 16, 16),
    "matmul float32": (lambda: matmul(random((16, 128)), random((16, 512))), "tensor", 2048, 2048),
    "matmul float32, ones": (
        lambda: matmul(positive((1, 128)), random((1, 512)), is_stationary_onezero=True),
        "tensor",
        1024,
        1024,
    ),
    "matmul strided": (lambda: matmul(narrow((128, 128)), narrow((128, 128, 9))[:, :, 0]), "tensor", 256, 256),
    "transpose float32": (lambda: transpose(random((100, 128)), empty((128, 100), nl.psum)), "tensor", 400, 200),
    "transpose on VectorE": (lambda: transpose(random((32, 32)), empty((32, 32))), "vector", 64, 64),
    "activation": (lambda: activate(random((128, 500))), "scalar", 500, 500),
    "activation of few": (lambda: activate(random((128, 1))), "scalar", 64, 64),
    "activation, sums kept": (lambda: activate(random((128, 500)), **SUM), "scalar", 500, 500),
    "activation, sums read": (lambda: activate(random((8, 500)), **SUM, reduce_res=empty((8, 1))), "scalar", 564, 564),
    "activation_reduce": (
        lambda: nisa.activation_reduce(
            dst=empty((8, 500)), op=nl.exp, data=random((8, 500)), reduce_op=nl.add, reduce_res=empty((8, 1))
        ),
        "scalar",
        564,
        564,
    ),
    "tensor_scalar": (lambda: scale(empty((128, 512)), random((128, 512))), "vector", 512, 512),
    "tensor_scalar bfloat16": (lambda: scale(narrow((128, 512)), narrow((128, 512))), "vector", 512, 128),
    "tensor_scalar bfloat16, strided": (
        lambda: scale(narrow((128, 512)), narrow((128, 512, 2))[:, :, 0]),
        "vector",
        512,
        256,
    ),
    "tensor_scalar bfloat16, PSUM": (lambda: scale(narrow((128, 512)), psum((128, 512), bfloat16)), "vector", 512, 256),
    "tensor_scalar rsqrt on GpSimd": (
        lambda: nisa.tensor_scalar(
            dst=empty((8, 500)), data=positive((8, 500)), op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd
        ),
        "gpsimd",
        2000,
        2000,
    ),
    "tensor_copy": (lambda: nisa.tensor_copy(dst=empty((128, 512)), src=psum((128, 512))), "vector", 512, 512),
    "tensor_copy bfloat16": (
        lambda: nisa.tensor_copy(dst=narrow((128, 512)), src=narrow((128, 512))),
        "vector",
        512,
        128,
    ),
    "tensor_copy on GpSimd": (
        lambda: nisa.tensor_copy(dst=narrow((128, 512)), src=narrow((128, 512)), engine=nisa.engine.gpsimd),
        "gpsimd",
        512,
        512,
    ),
    "tensor_copy of few": (lambda: nisa.tensor_copy(dst=empty((128, 3)), src=random((128, 3))), "vector", 64, 64),
    "tensor_copy, stride 16 bytes": (
        lambda: nisa.tensor_copy(dst=empty((128, 512)), src=random((128, 512, 4))[:, :, 1]),
        "vector",
        512,
        512,
    ),
    "tensor_copy, stride 20 bytes": (
        lambda: nisa.tensor_copy(dst=empty((128, 512)), src=random((128, 512, 5))[:, :, 1]),
        "vector",
        1024,
        1024,
    ),
    "tensor_tensor": (lambda: add(empty((128, 512)), random((128, 512)), random((128, 512))), "vector", 1024, 256),
    "tensor_tensor, one in PSUM": (
        lambda: add(empty((128, 512)), random((128, 512)), psum((128, 512))),
        "vector",
        512,
        512,
    ),
    "tensor_tensor, result in PSUM": (
        lambda: add(psum((128, 512)), random((128, 512)), random((128, 512))),
        "vector",
        1024,
        256,
    ),
    "tensor_tensor bfloat16": (
        lambda: add(narrow((128, 512)), narrow((128, 512)), narrow((128, 512))),
        "vector",
        512,
        256,
    ),
    "tensor_tensor bfloat16, maximum": (
        lambda: add(narrow((128, 512)), narrow((128, 512)), narrow((128, 512)), nl.maximum),
        "vector",
        1024,
        256,
    ),
    "tensor_tensor bfloat16 to float32": (
        lambda: add(empty((128, 512)), narrow((128, 512)), narrow((128, 512))),
        "vector",
        1024,
        256,
    ),
    "tensor_tensor bfloat16, parts": (
        lambda: add(narrow((128, 512)), narrow((128, 512)), narrow((128, 2, 300))[:, :, 0:256]),
        "vector",
        1024,
        256,
    ),
    "tensor_tensor bfloat16, repeated": (
        lambda: add(narrow((128, 512)), narrow((128, 512)), narrow((128, 256)).ap([[256, 128], [0, 2], [1, 256]])),
        "vector",
        1024,
        256,
    ),
    "tensor_tensor integers": (
        lambda: add(integers((8, 512)), integers((8, 512)), integers((8, 512))),
        "gpsimd",
        1024,
        256,
    ),
    "scan": (lambda: scan(empty((128, 512)), random((128, 512)), random((128, 512))), "vector", 1024, 512),
    "scan, one in PSUM": (lambda: scan(empty((128, 512)), random((128, 512)), psum((128, 512))), "vector", 1024, 512),
    "scalar_tensor_tensor": (
        lambda: scalar_tensor(empty((128, 512)), random((128, 512)), psum((128, 512))),
        "vector",
        1024,
        1024,
    ),
    "scalar_tensor_tensor, subtract and multiply": (
        lambda: scalar_tensor(empty((128, 512)), narrow((128, 512)), narrow((128, 512)), nl.subtract),
        "vector",
        512,
        512,
    ),
    "tensor_reduce": (lambda: reduce(empty((128, 1)), random((128, 512))), "vector", 512, 512),
    "tensor_reduce bfloat16": (lambda: reduce(narrow((128, 1)), narrow((128, 512))), "vector", 256, 256),
    "tensor_reduce bfloat16, minimum": (
        lambda: reduce(narrow((128, 1)), narrow((128, 512)), nl.minimum),
        "vector",
        512,
        512,
    ),
    "tensor_scalar_reduce": (
        lambda: nisa.tensor_scalar_reduce(
            dst=empty((8, 512)),
            data=random((8, 512)),
            op0=nl.multiply,
            operand0=2.0,
            reduce_op=nl.add,
            reduce_res=empty((8, 1)),
        ),
        "vector",
        576,
        576,
    ),
    "tensor_scalar_cumulative": (
        lambda: nisa.tensor_scalar_cumulative(
            dst=empty((8, 512)), src=random((8, 512)), op0=nl.multiply, op1=nl.add, imm0=1.0
        ),
        "vector",
        512,
        512,
    ),
    "select_reduce": (
        lambda: nisa.select_reduce(
            dst=empty((8, 512)), predicate=bits((8, 512)), on_true=random((8, 512)), on_false=0.0
        ),
        "vector",
        576,
        576,
    ),
    "tensor_copy_predicated": (lambda: predicated(random((8, 512)), bits((8, 512))), "vector", 1024, 1024),
    "tensor_copy_predicated, PSUM": (lambda: predicated(psum((8, 512)), bits((8, 512))), "vector", 512, 512),
    "reciprocal": (lambda: nisa.reciprocal(dst=empty((8, 512)), data=positive((8, 512))), "vector", 4096, 4096),
    "memset": (lambda: nisa.memset(dst=empty((8, 512)), value=0.0), "vector", 512, 512),
    "memset zero bfloat16": (lambda: nisa.memset(dst=narrow((8, 512)), value=0.0), "vector", 256, 256),
    "memset one bfloat16": (lambda: nisa.memset(dst=narrow((8, 512)), value=1.0), "vector", 512, 512),
    "bn_stats": (lambda: nisa.bn_stats(dst=empty((8, 6)), data=random((8, 512))), "vector", 512, 512),
    "bn_aggr": (lambda: nisa.bn_aggr(dst=empty((8, 2)), data=positive((8, 60))), "vector", 260, 260),
    "nc_stream_shuffle": (
        lambda: nisa.nc_stream_shuffle(dst=empty((32, 512)), src=random((1, 512)), shuffle_mask=[0] * 32),
        "vector",
        512,
        512,
    ),
    "iota": (lambda: nisa.iota(dst=empty((8, 512)), pattern=[[1, 512]], offset=0), "gpsimd", 662, 662),
    "affine_select": (
        lambda: nisa.affine_select(
            dst=empty((8, 512)),
            pattern=[[1, 512]],
            offset=0,
            channel_multiplier=1,
            on_true_tile=random((8, 512)),
            on_false_value=0.0,
        ),
        "gpsimd",
        662,
        662,
    ),
}


def issued(call, generation="gen2"):
    """The last instruction that `call` gives to a machine."""
    machine = Machine(generation)
    with machine.running():
        call()
    return machine.trace.instructions[-1]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("generation", ["gen2", "gen3"])
def test_cycles(name, generation):
    call, engine, on_trn1, on_trn2 = FORMULAS[name]
    instruction = issued(call, generation)
    assert instruction.engine == engine
    expected = on_trn1 if generation == "gen2" else on_trn2
    assert cycles.cycles(instruction, cycles.TARGETS[generation]) == expected


def test_every_formula_stands_in_the_table():
    names = {issued(call).name for call, *_ in FORMULAS.values()}
    assert names == set(cycles.FORMULAS)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("matmul bfloat16", 0),
        ("matmul few columns", 16),
        ("transpose float32", 16),  # 100 columns
        ("transpose on VectorE", 64),
        ("activation", 64),
        ("tensor_tensor", 64),
        ("tensor_copy on GpSimd", 64),
        ("iota", 0),
        ("affine_select", 0),
    ],
)
def test_fixed_cycles(name, fixed):
    assert cycles.fixed_cycles(issued(FORMULAS[name][0])) == fixed


@pytest.mark.parametrize(
    ("name", "trn1", "trn2"),
    [
        ("matmul bfloat16", 512 / 2800, 512 / 2400),
        ("activation", 564 / 1400, 564 / 1200),
        ("tensor_copy", 576 / 1120, 576 / 960),
        ("iota", 662 / 1400, 662 / 1200),
    ],
)
def test_microseconds_by_the_clock_of_each_engine(name, trn1, trn2):
    call = FORMULAS[name][0]
    assert cycles.busy_microseconds(issued(call), TRN1) == pytest.approx(trn1)
    assert cycles.busy_microseconds(issued(call, "gen3"), TRN2) == pytest.approx(trn2)


def copy_in(partitions, columns, dtype=np.float32, width=None):
    source = random((partitions, width or columns), nl.shared_hbm, dtype)
    return issued(lambda: nisa.dma_copy(dst=empty((partitions, columns), dtype=dtype), src=source[:, 0:columns]))


@pytest.fixture
def _machine():
    with Machine("gen2").running():
        yield


@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize(
    ("transfer", "nbytes", "efficiency", "engines"),
    [
        ((128, 512), 128 * 2048, 1.0, 16),
        ((128, 128), 128 * 512, 1.0, 16),
        ((128, 64), 128 * 256, 0.5, 16),  # 256 bytes a row
        ((128, 64, bfloat16), 128 * 128, 0.25, 16),
        ((128, 64, np.float32, 512), 128 * 256, 0.5, 16),
        ((100, 512), 100 * 2048, 1.0, 13),
        ((8, 512), 8 * 2048, 1.0, 1),
        ((1, 512), 2048, 1.0, 1),
        ((128, 1), 128 * 4, 4 / 512, 16),
    ],
)
def test_transfers(transfer, nbytes, efficiency, engines):
    instruction = copy_in(*transfer)
    assert cycles.busy_microseconds(instruction, TRN1) == pytest.approx(nbytes / efficiency / 272e3)
    assert cycles.busy_microseconds(instruction, TRN2) == pytest.approx(nbytes / efficiency / 368e3)
    alone = cycles.transfer_nanoseconds(instruction, TRN1)
    assert alone == pytest.approx(1300 + nbytes / efficiency / (17 * engines))


@pytest.mark.parametrize(
    ("call", "ports"),
    [
        (lambda: activate(random((8, 64))), set()),
        (lambda: activate(psum((8, 64))), {"psum_port"}),
        (lambda: nisa.tensor_copy(dst=psum((8, 64)), src=psum((8, 64))), {"psum_port"}),
        (lambda: nisa.tensor_copy(dst=empty((8, 64)), src=random((8, 64))), {"sbuf_port"}),
        (lambda: nisa.tensor_copy(dst=empty((8, 64)), src=psum((8, 64))), {"psum_port", "sbuf_port"}),
        (lambda: nisa.iota(dst=empty((8, 64)), pattern=[[1, 64]], offset=0), {"sbuf_port"}),
        (lambda: matmul(random((8, 64)), random((8, 64))), set()),
        (lambda: nisa.dma_copy(dst=empty((8, 64)), src=random((8, 64))), set()),
    ],
)
def test_ports(call, ports):
    assert set(cycles.shared_ports(issued(call))) == ports


@pytest.mark.parametrize("generation", ["gen2", "gen3"])
def test_a_kernel_takes_as_long_as_its_busiest_resource(generation):
    def kernel():
        product = psum((8, 512))
        nisa.activation(dst=empty((8, 512)), op=nl.exp, data=product)
        nisa.tensor_copy(dst=empty((8, 512)), src=product)

    machine = Machine(generation)
    machine.run(kernel)
    cost = cycles.cost(machine.trace)
    if generation == "gen2":  # the two take turns
        assert cost.critical == "psum_port"
        assert cost.microseconds == pytest.approx(576 / 1400 + 576 / 1120)
        assert cost.busy["sbuf_port"] == pytest.approx(576 / 1120)
    else:
        assert cost.critical == "vector"
        assert cost.microseconds == pytest.approx(576 / 960)
        assert "psum_port" not in cost.busy
    assert cost.psum_banks == 1
    assert cost.sbuf_bytes == 2048


def test_bytes_of_transfers():
    def kernel(x):
        nisa.dma_copy(dst=empty((128, 256)), src=x)
        nisa.dma_copy(dst=empty((128, 256), dtype=bfloat16), src=x)

    machine = Machine("gen2", compute=False)
    machine.run(kernel, np.zeros((128, 256), np.float32))
    assert cycles.cost(machine.trace).dma_bytes == 2 * 128 * 256 * 4


def test_no_cost_is_made_up():
    machine = Machine("gen4")
    machine.run(lambda: nisa.memset(dst=empty((8, 8)), value=0.0))
    with pytest.raises(KernelError, match="no cost model for gen4"):
        cycles.cost(machine.trace)
    machine = Machine("gen2")
    machine.run(lambda: nisa.tensor_partition_reduce(dst=empty((1, 8)), op=nl.add, data=random((8, 8))))
    with pytest.raises(KernelError, match="No cost is published for nisa.tensor_partition_reduce"):
        cycles.cost(machine.trace)


# The published profiles: milliseconds for which VectorE is active on trn1, with 4096 channels, state 16, float32. The
# tutorial "Fused Mamba" of the Neuron SDK gives durations, and the share of each in which VectorE is active.
CHANNELS = 4096
PUBLISHED = {
    "first version, T=512": (states_outer, 512, (), 2.34 * 0.9216),
    "second version, T=512": (channels_outer, 512, (512,), 1.61 * 0.9963),
    "third version, T=2048": (channels_outer, 2048, (512,), 6.6 * 0.949),
    "third version, T=8192": (channels_outer, 8192, (512,), 27.8 * 0.949),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_profiles(name):
    kernel, steps, options, published = PUBLISHED[name]
    lanes, states = 128, 16
    sizes = [(lanes, steps), (lanes, steps), (lanes, states), (states, steps), (states, steps)]
    machine = Machine("trn1", compute=False)
    machine.run(kernel, *(np.zeros(size, np.float32) for size in sizes), *options)
    cost = cycles.cost(machine.trace)
    modelled = cost.busy["vector"] * (CHANNELS / lanes) / 1e3  # every tile of 128 channels costs the same
    assert cost.critical == "vector"
    assert modelled == pytest.approx(published, rel=0.07)


@pytest.mark.parametrize(("kernel", "options"), [(states_outer, ()), (channels_outer, (64,)), (channels_outer, (32,))])
def test_the_calibrating_kernels_are_right(kernel, options):
    random_numbers = np.random.default_rng(0)
    channels, steps, states = 256, 64, 3
    delta, u = random_numbers.random((2, channels, steps), np.float32)
    decay = -random_numbers.random((channels, states), np.float32)
    b, c = random_numbers.standard_normal((2, states, steps)).astype(np.float32)
    y = Machine("gen2").run(kernel, delta, u, decay, b, c, *options)
    h, expected = np.zeros((channels, states)), np.zeros((channels, steps))
    for t in range(steps):
        step = delta[:, t : t + 1].astype(np.float64)
        h = np.exp(step * decay) * h + step * u[:, t : t + 1] * b[:, t]
        expected[:, t] = h @ c[:, t]
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)
