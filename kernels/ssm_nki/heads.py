"""What kernels do with the tiles of several heads side by side: [partitions, heads, free].

TensorE multiplies head by head; all other engines take all heads in one instruction, since each instruction has a fixed
cost. Four heads of 128 columns in float32 fill one bank of PSUM. As with ssm_nki.tiles, these functions are inlined.
"""

from ssm_nki.sdk import nisa, nl

HEADS = 4  # side by side: as many as fit one bank of PSUM at 128 columns each


def products(stationary, moving):
    """A new float32 tile [M, H, N] in PSUM: stationary[K, H, M]^T @ moving[K, H, N] for each head (TensorE)."""
    shape = (stationary.shape[2], moving.shape[1], moving.shape[2])
    sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    add_products(sums, stationary, moving)
    return sums


def add_products(sums, stationary, moving):
    """Add stationary[K, H, M]^T @ moving[K, H, N] to `sums`, float32 [M, H, N] in PSUM, for each head (TensorE).

    A `stationary` of one head serves all, in one product; then `sums` fits one bank. If `sums` has one head, all are
    added up there.
    """
    inner, heads, rows = stationary.shape
    columns = moving.shape[2]
    if heads < moving.shape[1]:
        nisa.nc_matmul(dst=sums, stationary=stationary[0:inner, 0, 0:rows], moving=moving)
    else:
        for h in range(heads):
            nisa.nc_matmul(
                dst=sums[0:rows, min(h, sums.shape[1] - 1), 0:columns],
                stationary=stationary[0:inner, h, 0:rows],
                moving=moving[0:inner, h, 0:columns],
            )


def transposed(tile, identity, dtype):
    """A new tile [F, H, P] in SBUF as `dtype`: `tile`[P, H, F] with each head transposed (TensorE, ScalarE).

    identity: of the type of `tile`, at least [P, P].
    """
    rows, heads, columns = tile.shape
    turned = nl.ndarray((columns, heads, rows), dtype=nl.float32, buffer=nl.psum)
    for h in range(heads):
        nisa.nc_matmul(
            dst=turned[0:columns, h, 0:rows],
            stationary=tile[0:rows, h, 0:columns],
            moving=identity[0:rows, 0:rows],
            is_moving_onezero=True,
        )
    return activated(turned, nl.copy, dtype)


def repeated(stack, layer, rows, heads, columns):
    """A view [rows, heads, columns] that shows every head the same part of `stack`[P, layers, F]."""
    layers, width = stack.shape[1], stack.shape[2]
    return stack.ap(pattern=[[layers * width, rows], [0, heads], [1, columns]], offset=layer * width)


def side_by_side(stack):
    """A new tile [P, layers, HEADS, F] in SBUF: stack[P, layers, F] for each head (VectorE).

    VectorE multiplies bfloat16 by it in half the time that it takes with a `repeated` view.
    """
    rows, layers, columns = stack.shape
    tile = nl.ndarray((rows, layers, HEADS, columns), dtype=stack.dtype, buffer=nl.sbuf)
    for h in range(HEADS):
        nisa.tensor_copy(dst=tile[0:rows, 0:layers, h, 0:columns], src=stack)
    return tile


def widened(factors, first, count, width):
    """A view [P, count, width] that shows each of factors[P, first : first + count] `width` times."""
    rows, heads = factors.shape
    return factors.ap(pattern=[[heads, rows], [1, count], [0, width]], offset=first)


def activated(source, op, dtype, scale=1.0):
    """A new tile in SBUF as `dtype`: op(scale * source) (ScalarE)."""
    tile = nl.ndarray(source.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=tile, op=op, data=source, scale=scale)
    return tile


def as_type(tile, dtype):
    """`tile`, or where it has another type a copy of it in SBUF as `dtype` (ScalarE)."""
    return tile if tile.dtype == dtype else activated(tile, nl.copy, dtype)


def scaled(tile, factors, dtype):
    """A new tile in SBUF as `dtype`: tile[P, H, F] times factors[P, H], float32 (ScalarE, head by head)."""
    rows, heads, columns = tile.shape
    product = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
    for h in range(heads):
        nisa.activation(
            dst=product[0:rows, h, 0:columns],
            op=nl.copy,
            data=tile[0:rows, h, 0:columns],
            scale=factors[0:rows, h : h + 1],
        )
    return product


def spread(matrix, factors, dtype):
    """A new tile [P, H, F] in SBUF as `dtype`: for each head `matrix`[P, F] times factors[P, H], float32 (ScalarE)."""
    rows, columns = matrix.shape
    heads = factors.shape[1]
    product = nl.ndarray((rows, heads, columns), dtype=dtype, buffer=nl.sbuf)
    for h in range(heads):
        nisa.activation(dst=product[0:rows, h, 0:columns], op=nl.copy, data=matrix, scale=factors[0:rows, h : h + 1])
    return product


def combined(data1, op, data2, dtype):
    """A new tile in SBUF as `dtype`: data1 op data2, at most one of them in PSUM (VectorE)."""
    tile = nl.ndarray(data1.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=tile, data1=data1, data2=data2, op=op)
    return tile


def summed(tile):
    """A new float32 tile [P, H] in SBUF: the sum of each head's columns in tile[P, H, F] (VectorE)."""
    sums = nl.ndarray((tile.shape[0], tile.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=2)
    return sums


def load(source, first, count, group):
    """A new tile [T, count, F] in SBUF: `count` heads of source[T, G, F] in HBM (DMA).

    `group` heads share one of the G: head `first + i` reads number (first + i) // group.
    """
    steps, width = source.shape[0], source.shape[2]
    tile = nl.ndarray((steps, count, width), dtype=source.dtype, buffer=nl.sbuf)
    if group == 1:
        nisa.dma_copy(dst=tile, src=source[0:steps, first : first + count, 0:width])
    else:
        for h in range(count):
            nisa.dma_copy(dst=tile[0:steps, h, 0:width], src=source[0:steps, (first + h) // group, 0:width])
    return tile


def load_state(state, first, last):
    """A new tile [K, heads, V] in SBUF: heads first to last - 1 of state [H, K, V] in HBM (DMA)."""
    channels, values = state.shape[1], state.shape[2]
    tile = nl.ndarray((channels, last - first, values), dtype=state.dtype, buffer=nl.sbuf)
    for h in range(first, last):
        nisa.dma_copy(dst=tile[0:channels, h - first, 0:values], src=state[h])
    return tile


def store_state(state, first, last, tile):
    """Write tile [K, heads, V] to heads first to last - 1 of state [H, K, V] in HBM (DMA)."""
    channels, values = state.shape[1], state.shape[2]
    for h in range(first, last):
        nisa.dma_copy(dst=state[h], src=tile[0:channels, h - first, 0:values])
