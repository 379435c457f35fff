"""The two layouts of a tile of time, and the ways from one to the other.

    steps first      [S, J, C]     S steps on partitions, J blocks of S steps, C channels: as in HBM, so easy to load
    channels first   [C, J * S]    C channels on partitions, all steps of the tile in order: what scans along time need

TensorE turns one into the other: a product with the identity transposes, with the reversal (ones where row + column =
S - 1) it transposes and reverses time, and with either of them scaled row by row it multiplies each step by a number.
A tile of time has blocks of one size: 128 steps, or what is left at the end, which is a tile of its own. The functions
here are inlined into kernels (see ssm_nki.tiles).
"""

from ssm_nki import tiles
from ssm_nki.sdk import nisa, nl

BLOCK = 128  # steps: as many as there are partitions
BLOCKS = 4  # of a tile at most: 512 steps in float32 are one bank of PSUM


def time_tiles(steps, blocks):
    """(first step, number of blocks, steps of a block) of each tile of `steps` steps, `blocks` blocks at most."""
    found = []
    start = 0
    while start < steps:
        size = min(BLOCK, steps - start)
        count = min(blocks, (steps - start) // size)
        found.append((start, count, size))
        start = start + count * size
    return found


def parts(total, size):
    """(first, number) of the pieces of at most `size` into which `total` is cut."""
    found = []
    for first in range(0, total, size):
        found.append((first, min(size, total - first)))
    return found


def in_memory(tensor, batch, time_tile, first, columns):
    """The view [S, J, columns] on a tile of `tensor`[B, T, C] in HBM, from column `first`."""
    start, count, size = time_tile
    steps, width = tensor.shape[1], tensor.shape[2]
    offset = (batch * steps + start) * width + first
    return tensor.ap(pattern=[[width, size], [size * width, count], [1, columns]], offset=offset)


def load(tensor, batch, time_tile, first, columns, dtype):
    """A new tile [S, J, columns] in SBUF with that part of `tensor`, as `dtype` (DMA)."""
    tile = nl.ndarray((time_tile[2], time_tile[1], columns), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=in_memory(tensor, batch, time_tile, first, columns))
    return tile


def store(tensor, batch, time_tile, first, tile):
    """Write `tile`[S, J, columns] to that part of `tensor`[B, T, C] (DMA, which converts)."""
    nisa.dma_copy(dst=in_memory(tensor, batch, time_tile, first, tile.shape[2]), src=tile)


def reversal(size, dtype):
    """A new tile [size, size] of ones where partition + column = size - 1, zeros elsewhere (VectorE, GpSimd)."""
    ones = tiles.filled((size, size), 1.0, dtype)
    tile = nl.ndarray((size, size), dtype=dtype, buffer=nl.sbuf)
    nisa.affine_select(
        dst=tile,
        pattern=[[1, size]],
        offset=1 - size,
        channel_multiplier=1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    return tile


def shared(matrix, count):
    """A list that gives each of `count` blocks the same matrix."""
    matrices = []
    for _ in range(count):
        matrices.append(matrix)
    return matrices


def scaled(matrix, columns, dtype):
    """For each n, for each block j: a new tile `matrix`[S, S] with the rows scaled by `columns`[S, J, N] (ScalarE)."""
    size, count, states = columns.shape
    found = []
    for n in range(states):
        of_state = []
        for j in range(count):
            tile = nl.ndarray((size, size), dtype=dtype, buffer=nl.sbuf)
            nisa.activation(dst=tile, op=nl.copy, data=matrix, scale=columns[0:size, j, n : n + 1])
            of_state.append(tile)
        found.append(of_state)
    return found


def channels_first(tile, first, channels, matrices, backwards=False, exact=False):
    """A new float32 tile [channels, J * S] in PSUM: `tile`[S, J, C] from channel `first` on, turned (TensorE).

    matrices: of each block, [S, S]: the identity or the reversal, or one of them with scaled rows; exact: they are not
    scaled. backwards: the blocks are laid down last to first, as goes with the reversal.
    """
    size, count = tile.shape[0], tile.shape[1]
    turned = nl.ndarray((channels, count * size), dtype=nl.float32, buffer=nl.psum)
    for j in range(count):
        place = (count - 1 - j if backwards else j) * size
        nisa.nc_matmul(
            dst=turned[0:channels, place : place + size],
            stationary=tile[0:size, j, first : first + channels],
            moving=matrices[j],
            is_moving_onezero=exact,
        )
    return turned


def steps_first(tile, count, size, identity):
    """A new float32 tile [S, J, C] in PSUM: the first J * S columns of `tile`[C, F], turned block by block (TensorE).

    identity: [128, 128] of the type of `tile`.
    """
    turned = nl.ndarray((size, count, tile.shape[0]), dtype=nl.float32, buffer=nl.psum)
    for j in range(count):
        turn_block(turned[0:size, j, 0 : tile.shape[0]], tile, j * size, identity)
    return turned


def turn_block(dst, tile, first, identity):
    """dst, float32 [S, C] in PSUM = S columns of `tile`[C, F] from `first` on, transposed (TensorE)."""
    size, channels = dst.shape
    nisa.nc_matmul(
        dst=dst,
        stationary=tile[0:channels, first : first + size],
        moving=identity[0:channels, 0:channels],
        is_moving_onezero=True,
    )


def add(sums, term, identity):
    """Add `term`, a tile [S, C] in SBUF, to `sums`, float32 [S, C] in PSUM; identity: of its type (TensorE)."""
    size = term.shape[0]
    nisa.nc_matmul(dst=sums, stationary=identity[0:size, 0:size], moving=term, is_stationary_onezero=True)


def on_all_partitions(row, first, width):
    """Part of `row`[D] in HBM on all partitions: a new float32 tile [128, width] in PSUM, width <= 512 (TensorE)."""
    ones = tiles.filled((1, BLOCK), 1.0, nl.float32)
    source = nl.ndarray((1, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=source, src=row.ap(pattern=[[width, 1], [1, width]], offset=first))
    return tiles.matmul(ones, source)
