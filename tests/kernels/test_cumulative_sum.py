"""The example kernel, and the tile helpers that it uses."""

import ml_dtypes
import numpy as np
import pytest

from ssm_nki import tiles
from ssm_nki.cumulative_sum import cumulative_sum
from ssm_nki.simulator import Machine
from ssm_nki.simulator import language as nl
from tests.kernels.tiles_of import random


@pytest.mark.parametrize("generation", ["gen2", "gen3", "gen4"])
@pytest.mark.parametrize("steps", [1, 64, 127, 128, 129, 300])
def test_cumulative_sum(steps, generation):
    x = np.random.default_rng(0).standard_normal((steps, 7)).astype(np.float32)
    expected = x.astype(np.float64).cumsum(0)
    y = Machine(generation).run(cumulative_sum, x)
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_transpose_by_the_identity(generation, dtype):
    tile = random((32, 100), dtype=dtype)
    turned = tiles.evict(tiles.transpose(tile, tiles.mask(32, dtype, nl.equal)), dtype)
    assert (turned.values == tile.values.T).all()


def test_masks(gen2):
    assert (tiles.mask(5, np.float32, nl.equal).values == np.eye(5)).all()
    assert (tiles.mask(5, np.float32, nl.greater_equal).values == np.triu(np.ones((5, 5)))).all()
    assert (tiles.mask(5, np.float32, nl.less).values == np.tril(np.ones((5, 5)), -1)).all()
