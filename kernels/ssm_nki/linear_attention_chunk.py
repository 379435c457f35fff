"""What the forward and the backward kernel of linear attention have in common: which heads go together, and masks.

Heads that share q and k, and whose decays do not change q and k, form a block: what depends on q and k alone is
computed once for it. A part is as many heads of a block as one bank of PSUM holds values of, side by side. Other heads
have q and k of their own; then a block is one part.
"""

from ssm_nki import chunk_decays, heads, tiles
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.sdk import nisa, nl

BANK = 512  # float32 numbers of a bank of PSUM, in each partition
WIDEST = 8  # heads of a part: their decays between steps fill two banks
BLOCK = 4096  # values of the heads of a block; their states lie in SBUF


def shares_keys(groups, count, kind):
    """Whether blocks of `count` heads with `groups` key heads have one q and k each."""
    return kind != "channel" and groups < count


def blocks(groups, count, values, kind):
    """All blocks of `count` heads with `groups` key heads, each a list of parts (first head, after its last head)."""
    shared = shares_keys(groups, count, kind)
    widest = max(1, min(WIDEST if shared else heads.HEADS, BANK // values))
    size = min(count // groups, max(widest, BLOCK // values)) if shared else widest
    found = []
    for start in range(0, count, count // groups if shared else count):
        end = start + count // groups if shared else count
        for first in range(start, end, size):
            last = min(first + size, end)
            parts = []
            for part in range(first, last, widest):
                parts.append((part, min(part + widest, last)))
            found.append(parts)
    return found


def constants(dtype, kind, row_is_later):
    """Masks in SBUF by name: those of chunk_decays.constants, ones, later and earlier (chunk_decays.level_halves)."""
    masks = chunk_decays.constants(dtype, kind, row_is_later)
    if kind != "none":
        masks["ones"] = tiles.filled((CHUNK, 1, CHUNK), 1.0, nl.float32)
    if kind == "channel":
        masks["later"], masks["earlier"] = chunk_decays.level_halves(dtype)
    return masks


def load_keys(source, first, last, count, kind):
    """q or k of a block in one chunk, a new tile [T, keys, K] in SBUF; source: [T, G, K] in HBM."""
    group = count // source.shape[1]
    if shares_keys(source.shape[1], count, kind):
        return heads.load(source, first // group, 1, 1)
    return heads.load(source, first, last - first, group)


def turned_values(tile, identity):
    """tile[P, H, V] with values on partitions: a list of new tiles in SBUF, one for each slice of up to 128 values.

    A slice is [values, H, P]; of 64 values, where H is even, [128, H / 2, P], two heads on top of each other.
    """
    rows, count, values = tile.shape
    side = 2 if values == CHUNK // 2 and count % 2 == 0 else 1
    slices = []
    for start in range(0, values, CHUNK):
        stop = min(start + CHUNK, values)
        width = side * (stop - start)
        turned = nl.ndarray((width, count // side, rows), dtype=nl.float32, buffer=nl.psum)
        for i in range(count // side):
            nisa.nc_matmul(
                dst=turned[0:width, i, 0:rows],
                stationary=tile[0:rows, i * side : (i + 1) * side, start:stop],
                moving=identity[0:rows, 0:rows],
                is_moving_onezero=True,
            )
        slices.append(heads.activated(turned, nl.copy, tile.dtype))
    return slices


def add_over_values(sums, stationary, moving, count):
    """Add the products of `count` heads over their values to `sums`, [M, count, N] in PSUM, or to its only head.

    stationary, moving: `turned_values` of tiles [M, count, V] and [N, count, V].
    """
    for i in range(len(moving)):
        width, layers, rows = stationary[i].shape
        columns = moving[i].shape[2]
        side = count // layers
        size = width // side
        for h in range(count):
            first = (h % side) * size
            nisa.nc_matmul(
                dst=sums[0:rows, min(h, sums.shape[1] - 1), 0:columns],
                stationary=stationary[i][first : first + size, h // side, 0:rows],
                moving=moving[i][first : first + size, h // side, 0:columns],
            )
