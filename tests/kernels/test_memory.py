"""Tensors and their views."""

import numpy as np
import pytest

from ssm_nki.simulator import Kernel, KernelError, Machine
from ssm_nki.simulator import isa as nisa
from ssm_nki.simulator import language as nl
from tests.kernels.tiles_of import empty, random, tile

pytestmark = pytest.mark.usefixtures("gen2")


def test_indices_keep_partitions_and_two_dimensions():
    chip, hbm = random((64, 16, 8)), random((4, 128, 32), nl.shared_hbm)
    assert chip[0].shape == (1, 16, 8)
    assert chip[:, 3].shape == (64, 8)
    assert chip[:, 3, 5].shape == (64, 1)
    assert chip[2, 3, 5].shape == (1, 1)
    assert chip[..., 2:4].shape == (64, 16, 2)
    assert chip[:, :, ::2].shape == (64, 16, 4)
    assert chip[nl.ds(32, 16), nl.ds(4, 3)].shape == (16, 3, 8)
    assert hbm[0].shape == (128, 32)
    assert hbm[1, 2].shape == (32,)
    assert (chip[32:64, 4:6, 1].values == chip.values[32:64, 4:6, 1]).all()


def test_properties():
    part = empty((128, 64), dtype=np.float16)[32:64, 8:24:2]
    assert (part.dtype, part.buffer, part.ndim, part.size) == (nl.float16, nl.sbuf, 2, 256)
    assert (part.strides, part.offset, part.start_partition) == ((64, 2), 32 * 64 + 8, 32)
    assert repr(part) == "<float16 tensor (32, 8) in SBUF>"


@pytest.mark.parametrize(
    "key",
    [
        (slice(0, 65),),
        (64,),
        (-1,),
        (slice(-2, None),),
        (slice(3, 3),),
        (0, slice(0, 4, 0)),
        (0, slice(4, 0, -1)),
        (0, 0, 0, 0),
        ("x",),
    ],
)
def test_indices_out_of_bounds(key):
    with pytest.raises(KernelError):
        random((64, 16, 8))[key]


def test_reshape_is_a_view():
    whole = random((8, 12))
    nisa.memset(dst=whole.reshape((8, 3, 4))[:, 1, :], value=7.0)
    assert (whole.values[:, 4:8] == 7).all()
    with pytest.raises(KernelError, match="does not fill"):
        whole.reshape((8, 13))
    with pytest.raises(KernelError, match="between partitions"):
        whole.reshape((4, 24))
    assert random((8, 12), nl.shared_hbm).reshape((4, 24)).shape == (4, 24)


def test_access_patterns():
    whole = tile(np.arange(64).reshape(4, 16))
    spread = whole.ap(pattern=[[16, 2], [0, 3], [4, 2]], offset=2 * 16 + 1)
    assert spread.shape == (2, 3, 2)
    assert spread.start_partition == 2
    assert spread.values.tolist() == [[[33, 37]] * 3, [[49, 53]] * 3]
    for match, parameters in {
        "first stride must be 16": {"pattern": [[8, 4], [1, 8]]},
        "reaches beyond": {"pattern": [[16, 4], [1, 8]], "offset": 9},
        "strides are 0 or more": {"pattern": [[16, 4], [-1, 8]]},
        "a partition and a free dimension": {"pattern": [[16, 4]]},
    }.items():
        with pytest.raises(KernelError, match=match):
            whole.ap(**parameters)


def test_views_that_the_compiler_of_0_2_0_cannot_make():
    whole = random((8, 12))
    twice = whole[0:4][0:2]
    for match, make in {
        "reshape.* for whole tensors only": lambda: whole[:, 0:6].reshape((8, 2, 3)),
        "ap.* for whole tensors only": lambda: whole[:, 0:6].ap(pattern=[[12, 8], [1, 2]]),
        "which .ap.* made": lambda: whole.ap(pattern=[[12, 8], [1, 2]])[0:4],
        "indexed twice before": lambda: twice[0],
    }.items():
        with pytest.raises(KernelError, match=match):
            make()


def test_kernels_of_others_have_the_views_of_0_6_0():
    def views():
        whole = tile(np.arange(96).reshape(8, 12))
        assert whole[:, 0:6].reshape((8, 2, 3))[0:4][0:2][0].values.tolist() == [[[0, 1, 2], [3, 4, 5]]]
        part = whole[:, 4:8].ap(pattern=[[12, 8], [1, 2]])
        assert part[0:1].values.tolist() == [[4, 5]]
        with pytest.raises(KernelError, match="the documentation disagrees"):
            whole[:, 4:8].ap(pattern=[[12, 8], [1, 2]], offset=1)
        with pytest.raises(KernelError, match="not contiguous"):
            whole.reshape((8, 3, 4))[:, :, 0:2].reshape((8, 6))

    Machine("gen2").run(Kernel(views, portable=False))


def test_contiguous_dimensions_merge():
    whole = random((4, 2, 3, 5))
    assert whole.access_pattern == [(1, 30)]
    assert whole[:, :, 1, :].access_pattern == [(15, 2), (1, 5)]
    assert whole[:, :, :, 0:1].access_pattern == [(5, 6)]
    assert whole[:, 0, 0, 0:1].access_pattern == []


def test_a_kernel_does_not_change_its_arguments():
    def overwrites(x):
        nisa.dma_copy(dst=x, src=random((4, 8)))
        return x

    with pytest.raises(KernelError, match="is an argument"):
        Machine("gen2").run(overwrites, np.zeros((4, 8), np.float32))
