"""What the selective scan reads in HBM, as tiles; shared by its forward and its backward kernel.

The functions here are inlined into kernels (see ssm_nki.tiles).
"""

from ssm_nki import layouts, tiles
from ssm_nki.sdk import nisa, nl

STATES = 64  # times blocks at most, so that the weights diag(B_n), 512 bytes for each state and block, fit SBUF
RESET_STEP = 1e32  # what a reset adds to the step size of the decay,
SLOWEST_RATE = -1e-28  # so that, at this rate or a faster one, nothing is left of the state


def blocks_for(states):
    """How many blocks a tile of time has."""
    return max(1, min(layouts.BLOCKS, STATES // states))


def rates(A, lanes, may_reset):
    """A as tiles [channels, N], for each (first, number) of `lanes`."""
    found = []
    for first, width in lanes:
        tile = tiles.load(A[first : first + width, 0 : A.shape[1]])
        if may_reset:
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.minimum, operand0=SLOWEST_RATE)
        found.append(tile)
    return found


def states_of(source, batch, lanes, states):
    """source[batch], [D, N] in HBM, or zeros for None: a new tile [channels, N] for each (first, number) of `lanes`."""
    found = []
    for first, width in lanes:
        if source is None:
            found.append(tiles.filled((width, states), 0.0, nl.float32))
        else:
            found.append(tiles.load(source[batch, first : first + width, 0:states]))
    return found


def written_type(dtype, scale_input):
    """The type of what is written to the states, for x of a type: dt x is not rounded, and x itself is exact."""
    return nl.float32 if scale_input else dtype


def coefficients(source, batch, time_tile, states):
    """B or C of a tile of time, [B, T, N] in HBM or None for ones, as a new float32 tile [S, J, N]."""
    if source is None:
        return tiles.filled((time_tile[2], time_tile[1], states), 1.0, nl.float32)
    loaded = layouts.load(source, batch, time_tile, 0, states, source.dtype)
    return tiles.evict(loaded, nl.float32)


def load(x, dt, reset, scale_input, batch, time_tile, first, width):
    """Tiles [S, J, width] of some channels, by name: x; dt; written, which is x, or dt x in float32; decay_steps, which
    is dt as the decay has it.
    """
    rows = {"x": layouts.load(x, batch, time_tile, first, width, x.dtype)}
    rows["dt"] = layouts.load(dt, batch, time_tile, first, width, nl.float32)
    rows["written"] = rows["x"]
    if scale_input:
        rows["written"] = nl.ndarray(rows["x"].shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=rows["written"], data1=rows["x"], data2=rows["dt"], op=nl.multiply)
    rows["decay_steps"] = rows["dt"]
    if reset is not None:
        rows["decay_steps"] = _with_resets(rows["dt"], reset, batch, time_tile)
    return rows


def _with_resets(dt, reset, batch, time_tile):
    """dt + 1e32 reset, a new tile like dt[S, J, C]."""
    start, count, size = time_tile
    width = dt.shape[2]
    columns = nl.ndarray((size, count), dtype=nl.float32, buffer=nl.sbuf)
    where = reset.ap(pattern=[[1, size], [size, count]], offset=batch * reset.shape[1] + start)
    nisa.dma_copy(dst=columns, src=where)
    nisa.tensor_scalar(dst=columns, data=columns, op0=nl.multiply, operand0=RESET_STEP)
    steps = nl.ndarray(dt.shape, dtype=nl.float32, buffer=nl.sbuf)
    for j in range(count):
        nisa.tensor_scalar(
            dst=steps[0:size, j, 0:width],
            data=dt[0:size, j, 0:width],
            op0=nl.add,
            operand0=columns[0:size, j : j + 1],
        )
    return steps


def decays(step_sizes, rates_of_lanes, n):
    """exp(dt A_n) for step_sizes [channels, steps], a new tile like it (ScalarE)."""
    decay = nl.ndarray(step_sizes.shape, dtype=nl.float32, buffer=nl.sbuf)
    rate = rates_of_lanes[0 : step_sizes.shape[0], n : n + 1]
    nisa.activation(dst=decay, op=nl.exp, data=step_sizes, scale=rate)
    return decay
