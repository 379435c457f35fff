"""What the forward and the backward kernel of the short convolution share: inputs with their past, weights, masks.

`windows` below: for each tile of channels, for each tap, a tile [channels, steps] and its first column: what the tap
multiplies. The functions here are inlined into kernels (see ssm_nki.tiles).
"""

from ssm_nki import layouts, tiles
from ssm_nki.sdk import nisa, nl

LANES = 128  # channels: as many as there are partitions
GROUP = 512  # channels that come out together: one bank of PSUM
TAPS = 32  # times blocks at most: with `reads` there is a tile for each tap


def blocks_for(taps):
    """How many blocks a tile of time has."""
    return max(1, min(layouts.BLOCKS, TAPS // taps))


def diagonals(weight, first, width, identity, dtype):
    """diag(weight_w) of some channels: for each tile of channels, for each tap, a new tile `dtype`[lanes, lanes]."""
    taps = weight.shape[1]
    found = []
    for start, lanes in layouts.parts(width, LANES):
        columns = tiles.load(weight[first + start : first + start + lanes, 0:taps])
        of_taps = []
        for w in range(taps):
            tile = nl.ndarray((lanes, lanes), dtype=dtype, buffer=nl.sbuf)
            part = identity[0:lanes, 0:lanes]
            nisa.activation(dst=tile, op=nl.copy, data=part, scale=columns[0:lanes, w : w + 1])
            of_taps.append(tile)
        found.append(of_taps)
    return found


def history(x, state, b, time_tile, first, width, taps, identity):
    """x of a tile of time after the W - 1 steps before it: a new tile [lanes, W - 1 + J * S] for each tile of channels.

    identity: [128, 128] of the type of x.
    """
    start, count, size = time_tile
    rows = layouts.load(x, b, time_tile, first, width, x.dtype)
    past = taps - 1
    if past > 0:
        rows_before = _steps_before(x, state, b, start, past, first, width)
    found = []
    for origin, lanes in layouts.parts(width, LANES):
        identities = layouts.shared(identity[0:size, 0:size], count)
        turned = layouts.channels_first(rows, origin, lanes, identities, exact=True)
        tile = nl.ndarray((lanes, past + count * size), dtype=x.dtype, buffer=nl.sbuf)
        nisa.activation(dst=tile[0:lanes, past : past + count * size], op=nl.copy, data=turned)
        if past > 0:
            before = tiles.matmul(rows_before[0:past, origin : origin + lanes], identity[0:past, 0:past])
            nisa.activation(dst=tile[0:lanes, 0:past], op=nl.copy, data=before)
        found.append(tile)
    return found


def _steps_before(x, state, b, start, past, first, width):
    """The inputs of the `past` steps before step `start`, [past, width]."""
    if start > 0:
        return tiles.load(x[b, start - past : start, first : first + width])
    if state is None:
        return tiles.filled((past, width), 0.0, x.dtype)
    return tiles.load(state[b, 0:past, first : first + width])


def last_inputs(x, state, b, first, width, past):
    """The inputs of the last `past` steps, of the state too where x is shorter: a new tile [past, width]."""
    steps = x.shape[1]
    tile = nl.ndarray((past, width), dtype=x.dtype, buffer=nl.sbuf)
    of_x = min(past, steps)
    nisa.dma_copy(dst=tile[past - of_x : past, 0:width], src=x[b, steps - of_x : steps, first : first + width])
    if of_x < past:
        older = tile[0 : past - of_x, 0:width]
        if state is None:
            nisa.memset(dst=older, value=0.0)
        else:
            nisa.dma_copy(dst=older, src=state[b, of_x:past, first : first + width])
    return tile


def forget(rows, reads, b):
    """Zero in rows [W - 1, width], one for each of the last steps in order, those from before the last reset."""
    taps, steps = reads.shape[1], reads.shape[2]
    column = nl.ndarray((taps - 1, 1), dtype=nl.float32, buffer=nl.sbuf)
    where = reads.ap(pattern=[[steps, taps - 1], [1, 1]], offset=(b * taps + 1) * steps + steps - 1)
    nisa.dma_copy(dst=column, src=where)
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=column)


def masks(reads, b, time_tile, further):
    """reads on all partitions, from the tile's first step to `further` after its last: a new tile [128, steps] for each
    tap but the last, 0 after the end of time; an empty list without `reads`.
    """
    if reads is None:
        return []
    found = []
    start, count, size = time_tile
    columns = count * size + further
    known = min(columns, reads.shape[2] - start)
    ones = tiles.filled((1, LANES), 1.0, reads.dtype)
    for w in range(reads.shape[1] - 1):
        tile = nl.ndarray((LANES, columns), dtype=reads.dtype, buffer=nl.sbuf)
        if known < columns:
            nisa.memset(dst=tile[0:LANES, known:columns], value=0.0)
        for first, width in layouts.parts(known, 512):
            row = tiles.load(reads[b, w : w + 1, start + first : start + first + width])
            spread = tiles.matmul(ones, row)
            nisa.activation(dst=tile[0:LANES, first : first + width], op=nl.copy, data=spread)
        found.append(tile)
    return found


def masked(tile, first, width, mask):
    """The columns of `tile`[lanes, steps] from `first` on where `mask` is 1, else 0: a new tile [lanes, width]."""
    lanes = tile.shape[0]
    product = nl.ndarray((lanes, width), dtype=tile.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=product, data1=tile[0:lanes, first : first + width], data2=mask[0:lanes, 0:width], op=nl.multiply
    )
    return product


def input_windows(inputs, kept, taps, steps):
    """The windows of z: tap w of the step in column t reads column t + w of `inputs`, where `kept` allows it."""
    found = []
    for tile in inputs:
        of_taps = []
        for w in range(taps):
            if w < len(kept):
                of_taps.append((masked(tile, w, steps, kept[w]), 0))
            else:
                of_taps.append((tile, w))
        found.append(of_taps)
    return found


def filtered(windows, weights, j, size, width):
    """The sum over taps for the steps of block j: a new float32 tile [size, width] in PSUM (TensorE)."""
    sums = nl.ndarray((size, width), dtype=nl.float32, buffer=nl.psum)
    lanes = layouts.parts(width, LANES)
    for k in range(len(lanes)):
        origin, count = lanes[k]
        for w in range(len(weights[k])):
            tile, first = windows[k][w]
            nisa.nc_matmul(
                dst=sums[0:size, origin : origin + count],
                stationary=tile[0:count, first + j * size : first + (j + 1) * size],
                moving=weights[k][w],
            )
    return sums


def with_bias(sums, shift):
    """sums + shift, a new tile in SBUF like `sums`[S, width]; or `sums`, where shift is None (VectorE)."""
    if shift is None:
        return sums
    size, width = sums.shape
    z = nl.ndarray((size, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=z, data1=sums, data2=shift[0:size, 0:width], op=nl.add)
    return z
