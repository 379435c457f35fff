"""The backward pass of ssm_nki.short_conv.

    z_t = bias + sum over w of weight_w x_{t - (W - 1) + w}        y_t = z_t, or SiLU(z_t)

With gz, the gradient of z, which is gy, or gy SiLU'(z) with z computed again:

    gradient of x_t       = sum over w of weight_w gz_{t + (W - 1) - w}     tap w of the later step, where it reads x_t
    gradient of weight_w  = sum over t of gz_t x_{t - (W - 1) + w}
    gradient of bias      = sum over t of gz_t

and the state is x of the W - 1 steps before the first. Time tiles go last to first, each taking gz of the W - 1 steps
after it from the one before. For a tile of 512 steps and 512 channels:

    step                           engine             operands
    x^T, z + bias                  as in the forward kernel
    gz = gy SiLU'(z)               ScalarE, VectorE   [128 steps, 512 channels]
    gz^T, and its sum over time    TensorE, ScalarE   -> SBUF [128 channels, 512 steps + W - 1]
    gx = sum of gz^T diag(weight)  TensorE, ScalarE   -> PSUM [128 steps, 512 channels] -> SBUF
    gz^T x^T, summed over time     VectorE, ScalarE   SBUF [128 channels, 512 steps], for each tap

`reads` zeroes gz^T for each tap but the last. Limits are those of the forward kernel.
"""

from ssm_nki import layouts, tiles
from ssm_nki import short_conv_taps as filters
from ssm_nki.sdk import nisa, nki, nl


@nki.jit
def short_conv_backward(grad_y, grad_next, x, weight, bias=None, state=None, reads=None, silu=False):
    """The gradients of x and weight, for W > 1 of the state, and where there is one of the bias.

    Args:
        grad_y: gradient of y, like x.
        grad_next: gradient of the next state, like it; None for zeros.
        x, weight, bias, state, reads, silu: as the forward kernel has them.

    Returns:
        Each in the shape and type of what it belongs to.
    """
    batches, steps, channels = x.shape
    taps = weight.shape[1]
    grads = {
        "x": nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm),
        "weight": nl.ndarray((channels, taps), dtype=nl.float32, buffer=nl.shared_hbm),
        "state": None,
        "bias": None,
    }
    if taps > 1:
        grads["state"] = nl.ndarray((batches, taps - 1, channels), dtype=x.dtype, buffer=nl.shared_hbm)
    if bias is not None:
        grads["bias"] = nl.ndarray((channels,), dtype=nl.float32, buffer=nl.shared_hbm)
    tools = _tools(x.dtype, taps)
    for first, width in layouts.parts(channels, filters.GROUP):
        weights = filters.diagonals(weight, first, width, tools["identity"], x.dtype)
        shift = None if bias is None else tiles.evict(layouts.on_all_partitions(bias, first, width), nl.float32)
        totals = []  # over batch and time, for each tile of channels: of the taps, then the bias
        for _, lanes in layouts.parts(width, filters.LANES):
            totals.append(tiles.filled((lanes, taps + 1), 0.0, nl.float32))
        for b in range(batches):
            tail = _gradient_of_next(grad_next, reads, b, first, width)
            later = None  # gz of the time tile after
            time_tiles = layouts.time_tiles(steps, filters.blocks_for(taps))
            for back in range(len(time_tiles)):
                time_tile = time_tiles[len(time_tiles) - 1 - back]
                _, count, size = time_tile
                inputs = filters.history(x, state, b, time_tile, first, width, taps, tools["typed_identity"])
                kept = filters.masks(reads, b, time_tile, taps - 1)
                grad_rows = layouts.load(grad_y, b, time_tile, first, width, x.dtype)
                if silu:
                    windows = filters.input_windows(inputs, kept, taps, count * size)
                    grad_rows = _through_silu(grad_rows, windows, weights, shift)
                grad_z = _channels_first(grad_rows, later, totals, taps, tools)
                windows = _gradient_windows(grad_z, kept, taps)
                _store_inputs(grads["x"], windows, weights, tail, steps, b, time_tile, first, width, tools)
                _add_weights(totals, windows, inputs, count * size)
                later = grad_z
            if taps > 1:
                grad_state = _gradient_of_state(windows, weights, tail, steps, width, tools)
                nisa.dma_copy(dst=grads["state"][b, 0 : taps - 1, first : first + width], src=grad_state)
        _store_totals(totals, grads, first, width)
    found = [grads["x"], grads["weight"]]
    for name in ("state", "bias"):
        if grads[name] is not None:
            found.append(grads[name])
    return tuple(found)


def _tools(dtype, taps):
    """Identities; `places`, ones where column = partition + 128: columns from 128 - n on move row i to row i + n."""
    tools = {
        "identity": tiles.mask(layouts.BLOCK, nl.float32, nl.equal),
        "typed_identity": tiles.mask(layouts.BLOCK, dtype, nl.equal),
    }
    if taps > 1:
        columns = 2 * layouts.BLOCK + taps - 1
        ones = tiles.filled((taps - 1, columns), 1.0, dtype)
        tools["places"] = nl.ndarray((taps - 1, columns), dtype=dtype, buffer=nl.sbuf)
        nisa.affine_select(
            dst=tools["places"],
            pattern=[[1, columns]],
            offset=-layouts.BLOCK,
            channel_multiplier=-1,
            on_true_tile=ones,
            on_false_value=0.0,
            cmp_op=nl.equal,
        )
    return tools


def _gradient_of_next(grad_next, reads, b, first, width):
    """grad_next of some channels, without what is from before the last reset: a new tile [W - 1, width], or None."""
    if grad_next is None:
        return None
    rows = tiles.load(grad_next[b, 0 : grad_next.shape[1], first : first + width])
    if reads is not None:
        filters.forget(rows, reads, b)
    return rows


def _through_silu(grad_y, windows, weights, shift):
    """gy SiLU'(z), a new tile like `grad_y`[S, J, width]."""
    size, count, width = grad_y.shape
    grad_z = nl.ndarray(grad_y.shape, dtype=grad_y.dtype, buffer=nl.sbuf)
    for j in range(count):
        z = filters.with_bias(filters.filtered(windows, weights, j, size, width), shift)
        slope = nl.ndarray((size, width), dtype=grad_y.dtype, buffer=nl.sbuf)
        nisa.activation(dst=slope, op=nl.silu_dx, data=z)
        nisa.tensor_tensor(
            dst=grad_z[0:size, j, 0:width], data1=grad_y[0:size, j, 0:width], data2=slope, op=nl.multiply
        )
    return grad_z


def _channels_first(grad_rows, later, totals, taps, tools):
    """gz and that of the W - 1 steps after, a new tile [lanes, J * S + W - 1] for each tile of channels.

    later: those of the time tile after this, or None at the end. The sums over time are added to the last
    column of `totals`.
    """
    size, count, width = grad_rows.shape
    steps, further = count * size, taps - 1
    identities = layouts.shared(tools["typed_identity"][0:size, 0:size], count)
    found = []
    lanes = layouts.parts(width, filters.LANES)
    for k in range(len(lanes)):
        origin, channels = lanes[k]
        turned = layouts.channels_first(grad_rows, origin, channels, identities, exact=True)
        tile = nl.ndarray((channels, steps + further), dtype=grad_rows.dtype, buffer=nl.sbuf)
        total = nl.ndarray((channels, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation_reduce(
            dst=tile[0:channels, 0:steps], op=nl.copy, data=turned, reduce_op=nl.add, reduce_res=total
        )
        column = totals[k][0:channels, taps : taps + 1]
        nisa.tensor_tensor(dst=column, data1=column, data2=total, op=nl.add)
        if further > 0:
            end = tile[0:channels, steps : steps + further]
            if later is not None:
                nisa.tensor_copy(dst=end, src=later[k][0:channels, 0:further])
            else:
                nisa.memset(dst=end, value=0.0)
        found.append(tile)
    return found


def _gradient_windows(grad_z, kept, taps):
    """The windows of gx: x of the step in column t was read by tap w of the step in column t + W - 1 - w."""
    found = []
    for tile in grad_z:
        of_taps = []
        for w in range(taps):
            source = tile
            if w < len(kept):
                source = filters.masked(tile, 0, tile.shape[1], kept[w])
            of_taps.append((source, taps - 1 - w))
        found.append(of_taps)
    return found


def _store_inputs(grad_x, windows, weights, tail, steps, b, time_tile, first, width, tools):
    """The gradient of x in a tile of time, with `tail`, that of the last inputs."""
    start, count, size = time_tile
    out = nl.ndarray((size, count, width), dtype=grad_x.dtype, buffer=nl.sbuf)
    for j in range(count):
        sums = filters.filtered(windows, weights, j, size, width)
        _add_tail(sums, tail, steps - (start + j * size), tools)
        nisa.activation(dst=out[0:size, j, 0:width], op=nl.copy, data=sums)
    layouts.store(grad_x, b, time_tile, first, out)


def _add_tail(sums, tail, end, tools):
    """Add tail [W - 1, width], whose last row is of row `end` - 1 of sums [S, width], where that has its rows."""
    if tail is None:
        return
    size, past = sums.shape[0], tail.shape[0]
    offset = end - past
    if offset < size:
        place = tools["places"][0:past, layouts.BLOCK - offset : layouts.BLOCK - offset + size]
        nisa.nc_matmul(dst=sums, stationary=place, moving=tail, is_stationary_onezero=True)


def _add_weights(totals, windows, inputs, steps):
    """Add the sums over time of gz x to the columns of `totals`, tap by tap."""
    for k in range(len(inputs)):
        lanes, taps = inputs[k].shape[0], len(windows[k])
        parts = nl.ndarray((lanes, taps), dtype=nl.float32, buffer=nl.sbuf)
        for w in range(taps):
            product = nl.ndarray((lanes, steps), dtype=inputs[k].dtype, buffer=nl.sbuf)
            grad_z = windows[k][w][0][0:lanes, 0:steps]
            nisa.tensor_tensor(dst=product, data1=inputs[k][0:lanes, w : w + steps], data2=grad_z, op=nl.multiply)
            total = parts[0:lanes, w : w + 1]
            nisa.activation_reduce(dst=product, op=nl.copy, data=product, reduce_op=nl.add, reduce_res=total)
        columns = totals[k][0:lanes, 0:taps]
        nisa.tensor_tensor(dst=columns, data1=columns, data2=parts, op=nl.add)


def _store_totals(totals, grads, first, width):
    """Write the gradients of weight and bias of some channels."""
    taps = grads["weight"].shape[1]
    lanes = layouts.parts(width, filters.LANES)
    for k in range(len(lanes)):
        start, count = first + lanes[k][0], lanes[k][1]
        nisa.dma_copy(dst=grads["weight"][start : start + count, 0:taps], src=totals[k][0:count, 0:taps])
        if grads["bias"] is not None:
            column = grads["bias"].ap(pattern=[[1, count], [1, 1]], offset=start)
            nisa.dma_copy(dst=column, src=totals[k][0:count, taps : taps + 1])


def _gradient_of_state(windows, weights, tail, steps, width, tools):
    """That of the W - 1 inputs before the first tile of time, whose windows are given: a new tile [W - 1, width]."""
    lanes = layouts.parts(width, filters.LANES)
    past = len(windows[0]) - 1
    sums = nl.ndarray((past, width), dtype=nl.float32, buffer=nl.psum)
    for k in range(len(lanes)):
        origin, channels = lanes[k]
        for w in range(past):
            source = windows[k][w][0]
            tile = tiles.filled((channels, 2 * past), 0.0, source.dtype)  # gz is 0 before the first step
            nisa.tensor_copy(dst=tile[0:channels, past : 2 * past], src=source[0:channels, 0:past])
            nisa.nc_matmul(
                dst=sums[0:past, origin : origin + channels],
                stationary=tile[0:channels, past - w : 2 * past - w],
                moving=weights[k][w],
            )
    _add_tail(sums, tail, steps + past, tools)
    return tiles.evict(sums, windows[0][0][0].dtype)
