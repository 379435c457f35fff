"""The module that kernels see as `nki.language`.

`zeros`, `load`, `store` and `broadcast_to` are here for kernels of others: NKI 0.2.0 does not have them all.
"""

from typing import Any

from ssm_nki.simulator import generations, isa
from ssm_nki.simulator.dtypes import DTYPES
from ssm_nki.simulator.errors import MissingError, UnsupportedError
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.memory import Buffer, Tensor
from ssm_nki.simulator.operators import OPERATORS

sbuf, psum = Buffer.sbuf, Buffer.psum
hbm, shared_hbm, private_hbm = Buffer.hbm, Buffer.shared_hbm, Buffer.private_hbm

globals().update(DTYPES)
globals().update(OPERATORS)


class tile_size:
    """Limits of a tile that hold in every generation."""

    pmax = generations.PARTITIONS
    gemm_stationary_fmax = generations.STATIONARY_LIMIT
    gemm_moving_fmax = generations.PSUM_BANK_BYTES // 4
    psum_fmax = generations.PSUM_BANK_BYTES // 4
    psum_bank_fmax = generations.PSUM_BANK_BYTES // 4
    bn_stats_fmax = generations.BN_STATS_LIMIT


class NKIObject:
    """Base of the classes that a kernel may define."""


def ndarray(shape: tuple[int, ...], dtype: Any, buffer: Buffer = sbuf, name: str = "") -> Tensor:
    """A tensor that nothing has written yet."""
    return current().allocate(shape, dtype, buffer, name)


def zeros(shape: tuple[int, ...], dtype: Any, buffer: Buffer = sbuf, name: str = "") -> Tensor:
    """A tensor of zeros in SBUF or PSUM (VectorE)."""
    tile = ndarray(shape, dtype, buffer, name)
    isa.memset(dst=tile, value=0.0)
    return tile


def load(src: Tensor, dtype: Any = None) -> Tensor:
    """A new tile in SBUF with the content of a tensor in HBM (DMA)."""
    tile = ndarray(src.shape, src.dtype if dtype is None else dtype)
    isa.dma_copy(dst=tile, src=src)
    return tile


def store(dst: Tensor, value: Tensor) -> None:
    """Write a tile to HBM (DMA)."""
    isa.dma_copy(dst=dst, src=value)


def broadcast_to(x: Tensor, shape: tuple[int, ...], dtype: Any = None) -> Tensor:
    """The row `x` [1, F] on all partitions of a new tile in PSUM, as a product with ones (TensorE)."""
    if x.partitions != 1 or tuple(shape[1:]) != x.shape[1:] or dtype is not None:
        raise UnsupportedError(f"The simulator broadcasts one partition to several, not {x!r} to {shape} as {dtype}.")
    ones = ndarray((1, shape[0]), x.dtype)
    isa.memset(dst=ones, value=1.0)
    spread = ndarray(shape, DTYPES["float32"], psum)
    isa.nc_matmul(dst=spread, stationary=ones, moving=x)
    return spread


def ds(start: int, size: int) -> slice:
    """start : start + size."""
    return slice(start, start + size)


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """`range`: the compiler unrolls every loop."""
    return range(start) if stop is None else range(start, stop, step)


sequential_range = static_range = affine_range


def device_print(print_prefix: str, tensor: Tensor) -> None:
    """Print what a tensor holds."""
    print(print_prefix, tensor.values)


def program_id(axis: int = 0) -> int:
    """Number of this program; the simulator runs one."""
    return 0


def num_programs(axes: int = 0) -> int:
    """How many programs run."""
    return 1


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise MissingError(f"The simulator does not have nl.{name}.")
