"""What several kernels do with tiles: load, store, fill, masks, transpose, matmul, evict.

These functions are inlined into the kernel that calls them, so they obey the compiler's rules too (see ssm_nki.lint).
A tile has its partitions first: [partitions, free], at most 128 partitions.
"""

from ssm_nki.sdk import nisa, nl


def load(source):
    """A new tile in SBUF with the content of `source`, [P, F] in HBM (DMA)."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def filled(shape, value, dtype):
    """A new tile in SBUF of `shape`, filled with the number `value` (1.0, not 1, where dtype is floating) (VectorE)."""
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def mask(size, dtype, keep):
    """A new tile [size, size] of ones where `keep(column - partition, 0)`, zeros elsewhere (VectorE, GpSimd).

    keep: nl.equal makes the identity, nl.greater_equal the upper triangle with the diagonal, nl.less the lower triangle
    without it. As the stationary operand of a matmul, which is read transposed, the upper triangle sums over the past.
    """
    ones = filled((size, size), 1.0, dtype)
    tile = nl.ndarray((size, size), dtype=dtype, buffer=nl.sbuf)
    nisa.affine_select(
        dst=tile,
        pattern=[[1, size]],
        offset=0,
        channel_multiplier=-1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=keep,
    )
    return tile


def matmul(stationary, moving):
    """A new float32 tile [M, N] in PSUM: stationary[K, M]^T @ moving[K, N] (TensorE)."""
    product = nl.ndarray((stationary.shape[1], moving.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)
    return product


def evict(source, dtype):
    """A new tile in SBUF with the content of `source`, a tile in PSUM, as `dtype` (ScalarE)."""
    tile = nl.ndarray(source.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=tile, op=nl.copy, data=source)
    return tile


def transpose(tile, identity):
    """A new float32 tile [F, P] in PSUM: `tile`[P, F] transposed; identity: [P, P] of the same type (TensorE).

    It multiplies by the identity, since nc_transpose writes other types than float32 to PSUM from gen3 on only.
    """
    return matmul(tile, identity)
