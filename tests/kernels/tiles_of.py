"""Tensors with a given content, for tests of single instructions."""

import numpy as np

from ssm_nki.simulator import language as nl
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.memory import Buffer, Tensor


def tile(content, buffer: Buffer = nl.sbuf, dtype=np.float32) -> Tensor:
    """A tensor that holds `content`, an array."""
    values = np.array(content, dtype)
    return current().allocate(values.shape, dtype, buffer, values=values)


def random(shape: tuple[int, ...], buffer: Buffer = nl.sbuf, dtype=np.float32, seed: int = 0) -> Tensor:
    """A tensor of normal random numbers."""
    return tile(np.random.default_rng(seed).standard_normal(shape), buffer, dtype)


def empty(shape: tuple[int, ...], buffer: Buffer = nl.sbuf, dtype=np.float32) -> Tensor:
    """A tensor that nothing has written."""
    return nl.ndarray(shape, dtype, buffer)


def wide(tensor: Tensor) -> np.ndarray:
    """What a tensor holds, as float64 [partitions, elements]."""
    return tensor.values.astype(np.float64).reshape(tensor.partitions, -1)
