"""Each rule of the memories, broken: the error names instruction and rule. Beside it, what is just legal."""

import ml_dtypes
import numpy as np
import pytest

from ssm_nki.simulator import Machine, UnsupportedError, generations
from ssm_nki.simulator import isa as nisa
from ssm_nki.simulator import language as nl
from tests.kernels.rules import copy, matmul, refuses
from tests.kernels.tiles_of import empty, random

bfloat16 = ml_dtypes.bfloat16


# Partitions and access patterns


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum])
def test_128_partitions(generation, buffer):
    empty((128, 4), buffer)
    with refuses("129 partitions"):
        empty((129, 4), buffer)
    empty((4096, 4), nl.shared_hbm)


def test_two_dimensions_on_chip(gen2):
    with refuses("a partition and a free dimension"):
        empty((128,))
    with refuses("sizes of 1 or more"):
        empty((128, 0))


@pytest.mark.parametrize(
    ("count", "legal"),
    [(128, [0]), (65, [0]), (64, [0, 64]), (33, [0, 64]), (32, [0, 32, 64, 96]), (1, [0, 32, 64, 96])],
)
def test_start_partitions(gen2, count, legal):
    whole = random((128, 4))
    for start in range(0, 129 - count):
        part = whole[start : start + count, 0:4]
        if start in legal:
            copy(part, part)
        else:
            with refuses(f"tensor_copy: .* starts at partition {start};"):
                copy(part, part)


def test_dma_starts_anywhere(gen2):
    nisa.dma_copy(dst=empty((128, 4))[7:20, 0:4], src=random((13, 4), nl.shared_hbm))


def test_four_free_dimensions(gen2):
    whole = random((2, 3, 3, 3, 3, 4))
    copy(empty((2, 162)), whole[0:2, 0:3, 0:3, 0:3, 0:3, 0:2])  # three of them are contiguous
    part = whole[0:2, 0:2, 0:2, 0:2, 0:2, 0:2]
    with refuses("5 free dimensions"):
        copy(empty((2, 32)), part)


def test_strides_and_sizes_fit_an_instruction(gen2):
    wide = random((1, 2, 2**15), dtype=bfloat16)
    copy(empty((1, 2 * (2**15 - 1)), dtype=bfloat16), random((1, 2, 2**15 - 1), dtype=bfloat16))
    with refuses("a stride or a size that an instruction cannot hold"):
        copy(empty((1, 2), dtype=bfloat16), wide[0:1, 0:2, 0:1])
    with refuses("a stride or a size that an instruction cannot hold"):
        copy(empty((1, 2**16), dtype=bfloat16), wide)


def test_nothing_is_written_through_a_stride_of_zero(gen2):
    spread = random((4, 8)).ap(pattern=[[8, 4], [0, 3], [1, 8]])
    copy(empty((4, 24)), spread)
    with refuses("stride of 0"):
        copy(spread, random((4, 24)))


def test_partitions_have_no_stride(gen2):
    with refuses("partitions have no stride"):
        empty((128, 4))[0:128:2, 0:4]


# Memory


def test_engines_reach_only_their_memories(gen2):
    hbm, sbuf, psum = empty((4, 4), nl.shared_hbm), random((4, 4)), random((4, 4), nl.psum)
    nisa.dma_copy(dst=hbm, src=sbuf)
    with refuses("tensor_copy: .*shared HBM> cannot be read by the vector engine"):
        copy(sbuf, hbm)
    with refuses("activation: .*shared HBM> cannot be written by the scalar engine"):
        nisa.activation(dst=hbm, op=nl.copy, data=sbuf)
    with refuses("dma_copy: .*PSUM> cannot be read by the dma engine"):
        nisa.dma_copy(dst=hbm, src=psum)
    with refuses("iota: .*PSUM> cannot be written by the gpsimd engine"):
        nisa.iota(dst=psum, pattern=[[1, 4]], offset=0)
    with refuses("tensor_tensor: .*PSUM> cannot be read by the gpsimd engine"):
        nisa.tensor_tensor(dst=sbuf, data1=sbuf, data2=psum, op=nl.power)
    with refuses("nc_matmul: .*SBUF> cannot be written by the tensor engine"):
        matmul(empty((4, 4)), sbuf, sbuf)
    with refuses("nc_matmul: .*PSUM> cannot be read by the tensor engine"):
        matmul(empty((4, 4), nl.psum), psum, sbuf)


def test_two_inputs_are_not_both_in_psum(gen2):
    a, b, out = random((4, 4), nl.psum), random((4, 4), nl.psum), empty((4, 4))
    with refuses("tensor_tensor: .* both in PSUM"):
        nisa.tensor_tensor(dst=out, data1=a, data2=b, op=nl.add)
    with refuses("scalar_tensor_tensor: .* both in PSUM"):
        nisa.scalar_tensor_tensor(dst=out, data=a, op0=nl.add, operand0=1.0, op1=nl.add, operand1=b)
    with refuses("tensor_tensor_scan: .* both in PSUM"):
        nisa.tensor_tensor_scan(dst=out, data0=a, data1=b, initial=0.0, op0=nl.add, op1=nl.add)
    nisa.tensor_tensor(dst=a, data1=a, data2=random((4, 4)), op=nl.add)


@pytest.mark.parametrize(("target", "kib"), [("trn1", 176), ("trn2", 208), ("trn3", 240)])
def test_room_of_one_tensor(target, kib):
    with Machine(target).running():
        empty((128, kib * 256))
        with refuses(f"{kib * 1024 + 4} bytes in each partition: SBUF has {kib * 1024}"):
            empty((128, kib * 256 + 1))
        empty((128, 4096), nl.psum)
        with refuses("PSUM has 16384"):
            empty((128, 4097), nl.psum)


def kernel_with_tiles(sizes, keep, buffer=nl.sbuf):
    """Write a tile for each of `sizes` (KiB in each partition); read all at the end, or each at once."""

    def kernel():
        made = []
        for size in sizes:
            made.append(nl.ndarray((128, size * 256), nl.float32, buffer, name=f"tile {size}"))
            nisa.memset(dst=made[-1], value=0.0)
            if not keep:
                copy(made[-1], made[-1])
        for one in made if keep else []:
            copy(one, one)

    return kernel


def test_room_of_sbuf_over_time():
    machine = Machine("gen2")
    machine.run(kernel_with_tiles([50, 60, 66], keep=True))
    assert machine.trace.peak_sbuf() == 176 * 1024
    machine.run(kernel_with_tiles([50] * 9, keep=False))  # a tile that is no longer used makes room
    assert machine.trace.peak_sbuf() == 50 * 1024
    with refuses("SBUF holds 180224 bytes .* 181248 live at once in 3 tensors; the largest: tile 67 "):
        machine.run(kernel_with_tiles([50, 60, 67], keep=True))


def test_room_of_psum_over_time():
    machine = Machine("gen2")
    machine.run(kernel_with_tiles([2] * 8, keep=True, buffer=nl.psum))
    assert machine.trace.peak_psum_banks() == 8
    machine.run(kernel_with_tiles([1] * 9, keep=True, buffer=nl.psum))  # two share a bank
    assert machine.trace.peak_psum_banks() == 5
    machine.run(kernel_with_tiles([2] * 20, keep=False, buffer=nl.psum))
    with refuses("PSUM has 8 banks .* no room for tile 2 of 2048 bytes"):
        machine.run(kernel_with_tiles([2] * 9, keep=True, buffer=nl.psum))


def test_uninitialised_memory(generation):
    half = empty((4, 8))
    assert np.isnan(half.values).all()
    nisa.memset(dst=half[0:4, 0:4], value=1.0)
    copy(empty((4, 4)), half[0:4, 0:4])
    with refuses("tensor_copy: .*some of its elements were never written"):
        copy(empty((4, 5)), half[0:4, 0:5])


def test_results_are_written_and_in_hbm(gen2):
    def leaves_a_hole():
        y = nl.ndarray((4, 4), nl.float32, nl.shared_hbm, name="y")
        nisa.dma_copy(dst=y[0:3, 0:4], src=random((3, 4)))
        return y

    with refuses("'y' .* with 4 elements that it never wrote"):
        Machine("gen2").run(leaves_a_hole)
    with refuses("returns tensors in HBM"):
        Machine("gen2").run(lambda: random((4, 4)))


# What is not there


def test_what_the_simulator_lacks_is_named(gen2):
    data = random((4, 8))
    for missing, call in {
        "nisa.dma_transpose": lambda: nisa.dma_transpose(dst=data, src=data),
        "nl.softmax": lambda: nl.softmax(data, axis=1),
        "the parameter priority": lambda: nisa.dma_copy(dst=data, src=data, priority=1),
        "tile_position": lambda: matmul(data, data, data, tile_position=(0, 0), tile_size=(64, 64)),
        "perf_mode": lambda: matmul(data, data, data, perf_mode=nisa.matmul_perf_mode.double_row),
        "dst_rmw_op": lambda: nisa.dma_copy(dst=data, src=data, dst_rmw_op=nl.add),
        "tensors have no .permute": lambda: data.permute((1, 0)),
        r"\.ap\(scalar_offset": lambda: data.ap(pattern=[[8, 4], [1, 8]], scalar_offset=data),
        "not by assignment": lambda: data.__setitem__(slice(None), 0.0),
    }.items():
        with pytest.raises(UnsupportedError, match=missing):
            call()


def test_missing_names_can_be_asked_about(gen2):
    assert not hasattr(nisa, "dma_transpose")
    assert not hasattr(random((4, 8)), "permute")


def test_operators_are_not_called(gen2):
    with refuses("nl.exp.* called as a function"):
        nl.exp(random((4, 8)))


def test_instructions_need_a_machine():
    with refuses("No kernel is running"):
        nl.ndarray((4, 8), nl.float32, nl.sbuf)


def test_generations_have_names():
    assert {name: generations.find(name).name for name in ("trn1", "inf2", "gen3", "trn3")} == {
        "trn1": "gen2",
        "inf2": "gen2",
        "gen3": "gen3",
        "trn3": "gen4",
    }
    with refuses("no generation 'trn9'"):
        Machine("trn9")


def test_the_environment_chooses_the_generation(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert Machine().generation.name == "gen3"
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    assert Machine().generation.name == "gen2"


def test_numpy_types_that_nki_lacks():
    with refuses("float64.* is no data type of NKI"):
        Machine("gen2").run(lambda x: x, np.ones(3))
