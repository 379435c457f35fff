"""The selective scan of the public fused-Mamba tutorial of the Neuron SDK, written anew to calibrate the cost model.

    h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t,   y_t = sum over states of C_t h_t

`channels_outer` is the tutorial's second version (one tile of time) and third (tiles of 512 steps), with delta * u
hoisted out of the loop over states, as the compiler did in the published profiles; `states_outer` is its first version,
whose order of loops leaves nothing to hoist. delta, u [channels, T], A [channels, N], B, C [N, T], all float32.
"""

from ssm_nki import tiles
from ssm_nki.sdk import nisa, nki, nl

LANES = 128


def load_rows(source, start, columns):
    return tiles.load(source[start : start + LANES, 0:columns])


def new(columns):
    return nl.ndarray((LANES, columns), dtype=nl.float32, buffer=nl.sbuf)


def multiply(first, second, columns):
    product = new(columns)
    nisa.tensor_tensor(dst=product, data1=first, data2=second, op=nl.multiply)
    return product


def spread(row, ones):
    """A row on all partitions, in PSUM."""
    return tiles.matmul(ones, tiles.load(row))


def scan_state(delta, delta_u, a, b_row, c_row, ones, initial, columns):
    """(h, C h) of one state over one tile of time."""
    decay = new(columns)
    nisa.activation(dst=decay, op=nl.exp, data=delta, scale=a)
    drive = multiply(delta_u, spread(b_row, ones), columns)
    h = new(columns)
    nisa.tensor_tensor_scan(dst=h, data0=decay, data1=drive, initial=initial, op0=nl.multiply, op1=nl.add)
    return h, multiply(h, spread(c_row, ones), columns)


@nki.jit
def states_outer(delta, u, A, B, C):
    channels, steps = delta.shape
    y = nl.ndarray((channels, steps), dtype=nl.float32, buffer=nl.shared_hbm)
    ones = tiles.filled((1, LANES), 1.0, nl.float32)
    sums = []
    for _ in range(channels // LANES):
        sums.append(tiles.filled((LANES, steps), 0.0, nl.float32))
    for n in range(A.shape[1]):
        for tile in range(channels // LANES):
            start = tile * LANES
            delta_tile = load_rows(delta, start, steps)
            delta_u = multiply(delta_tile, load_rows(u, start, steps), steps)
            a = tiles.load(A[start : start + LANES, n : n + 1])
            _, term = scan_state(delta_tile, delta_u, a, B[n : n + 1, 0:steps], C[n : n + 1, 0:steps], ones, 0.0, steps)
            nisa.tensor_tensor(dst=sums[tile], data1=sums[tile], data2=term, op=nl.add)
    for tile in range(channels // LANES):
        nisa.dma_copy(dst=y[tile * LANES : (tile + 1) * LANES, 0:steps], src=sums[tile])
    return y


@nki.jit
def channels_outer(delta, u, A, B, C, columns):
    channels, steps = delta.shape
    y = nl.ndarray((channels, steps), dtype=nl.float32, buffer=nl.shared_hbm)
    ones = tiles.filled((1, LANES), 1.0, nl.float32)
    for start in range(0, channels, LANES):
        total = tiles.filled((LANES, steps), 0.0, nl.float32)
        delta_tile = load_rows(delta, start, steps)
        delta_u = multiply(delta_tile, load_rows(u, start, steps), steps)
        for n in range(A.shape[1]):
            a = tiles.load(A[start : start + LANES, n : n + 1])
            carry = 0.0
            for first in range(0, steps, columns):
                last = first + columns
                h, term = scan_state(
                    delta_tile[0:LANES, first:last],
                    delta_u[0:LANES, first:last],
                    a,
                    B[n : n + 1, first:last],
                    C[n : n + 1, first:last],
                    ones,
                    carry,
                    columns,
                )
                if last < steps:
                    carry = new(1)
                    nisa.tensor_copy(dst=carry, src=h[0:LANES, columns - 1 : columns])
                part = total[0:LANES, first:last]
                nisa.tensor_tensor(dst=part, data1=part, data2=term, op=nl.add)
        nisa.dma_copy(dst=y[start : start + LANES, 0:steps], src=total)
    return y
