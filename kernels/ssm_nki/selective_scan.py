"""The selective scan of Mamba: one linear recurrence for each channel and state. The backward kernel has its own file.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = sum over states of C_t h_t  +  D x_t

    x, y  input and output, D channels    dt  step size of each channel    A  rate, of each channel and state
    h     N states of each channel        B, C  how the states are written and read, for all channels

Gu and Dao 2023 (arXiv:2312.00752). The scan runs along the free dimension, with channels on partitions. There, A is a
number for each partition, which ScalarE multiplies for nothing. B_t and C_t are numbers for each partition where steps
lie on them, so they enter on the way from one layout to the other (see ssm_nki.layouts), which leaves VectorE nothing
but the scan. For a tile of 512 steps, 512 channels and one state n:

    step                          engine    operands
    exp(dt A_n)                   ScalarE   dt turned once for all states, SBUF [128 channels, 512 steps]
    u = (dt x)^T diag(B_n)        TensorE   SBUF [128 steps, 128 channels], [128 steps, 128 steps] -> PSUM [128, 512]
    h = exp(dt A_n) h + u         VectorE   scan: SBUF, PSUM [128 channels, 512 steps] -> SBUF
    h^T                           TensorE   SBUF -> PSUM [128 steps, 512 channels]
    C_n h^T                       ScalarE   PSUM -> SBUF
    y += C_n h^T                  TensorE   product with the identity, added up in PSUM over all states

D x is one more such term. Tiles have 8192 / N steps, 128 to 512. Loops: time outside, so that diag(B_n) serves all
channels. B or C that is None stands for ones: with N = 1 and scale_input=False this is the gated RNN (RG-LRU, HGRN)
h_t = exp(dt_t A) h_{t-1} + x_t. A reset adds 1e32 to dt in the exponential, with A at most -1e-28: the decay is 0.

dt x, the scan and the states are float32; what is read out is of the type of x. Limits: N <= 64, D <= 8192, finite
inputs. Any T: what is left after blocks of 128 steps is a shorter block. A tile of 512 steps takes about 14
instructions for each state and 128 channels, and compilers unroll them: cut large calls by batch or channels.
"""

from ssm_nki import layouts, tiles
from ssm_nki import selective_scan_inputs as inputs
from ssm_nki.sdk import nisa, nki, nl
from ssm_nki.selective_scan_backward import selective_scan_backward

__all__ = ["selective_scan_backward", "selective_scan_forward"]

LANES = 128  # channels: as many as there are partitions
GROUP = 512  # channels that are read out together: one bank of PSUM


@nki.jit
def selective_scan_forward(x, dt, A, B=None, C=None, D=None, state=None, reset=None, scale_input=True, keep=False):
    """(y, last state), and with `keep` the states that enter the tiles of time, for the backward kernel.

    Args:
        x: [B, T, D], float32 or bfloat16.
        dt: step sizes >= 0, float32 [B, T, D].
        A: rates <= 0, float32 [D, N].
        B, C: [B, T, N] in the type of x; None for ones.
        D: float32 [D]; None for no skip connection.
        state: h before the first step, float32 [B, D, N]; None for zeros.
        reset: float32 [B, T], 1 where the state is zeroed before the step, else 0; None for nowhere.
        scale_input: whether x is multiplied by dt where it is written to the states.
        keep: return float32 [B, tiles, D, N] too.

    Returns:
        y: [B, T, D] in the type of x; the last state: float32 [B, D, N].
    """
    batches, steps, channels = x.shape
    states = A.shape[1]
    time_tiles = layouts.time_tiles(steps, inputs.blocks_for(states))
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    last = nl.ndarray((batches, channels, states), dtype=nl.float32, buffer=nl.shared_hbm)
    results = [y, last]
    if keep:
        entering = (batches, len(time_tiles), channels, states)
        results.append(nl.ndarray(entering, dtype=nl.float32, buffer=nl.shared_hbm))
    identity = tiles.mask(LANES, nl.float32, nl.equal)
    typed_identity = tiles.mask(LANES, x.dtype, nl.equal)
    lanes = layouts.parts(channels, LANES)
    rates = inputs.rates(A, lanes, reset is not None)
    for b in range(batches):
        carries = inputs.states_of(state, b, lanes, states)
        for i in range(len(time_tiles)):
            time_tile = time_tiles[i]
            if keep:
                for k in range(len(lanes)):
                    first, width = lanes[k]
                    nisa.dma_copy(dst=results[2][b, i, first : first + width, 0:states], src=carries[k])
            writes = inputs.coefficients(B, b, time_tile, states)
            reads = inputs.coefficients(C, b, time_tile, states)
            size = time_tile[2]
            weights = layouts.scaled(identity[0:size, 0:size], writes, inputs.written_type(x.dtype, scale_input))
            for first, width in layouts.parts(channels, GROUP):
                rows = inputs.load(x, dt, reset, scale_input, b, time_tile, first, width)
                sums = _scan_group(rows, weights, reads, first, rates, carries, identity, typed_identity)
                if D is not None:
                    _add_skip(sums, rows["x"], layouts.on_all_partitions(D, first, width), typed_identity)
                out = nl.ndarray((size, time_tile[1], width), dtype=x.dtype, buffer=nl.sbuf)
                for j in range(time_tile[1]):
                    nisa.activation(dst=out[0:size, j, 0:width], op=nl.copy, data=sums[j])
                layouts.store(y, b, time_tile, first, out)
        for k in range(len(lanes)):
            first, width = lanes[k]
            nisa.dma_copy(dst=last[b, first : first + width, 0:states], src=carries[k])
    return tuple(results)


def _scan_group(rows, weights, reads, origin, rates, carries, identity, typed_identity):
    """The sum over states of C h for channels from `origin` on: for each block a float32 tile [S, width] in PSUM.

    `carries`, the states before the tile of time, become those after it.
    """
    written = rows["written"]
    size, count, width = written.shape
    states = reads.shape[2]
    members, place = layouts.parts(width, LANES), origin // LANES
    # On trn1 VectorE and ScalarE take turns at PSUM: there every other scan keeps off it.
    takes_turns = nisa.get_nc_version() == nisa.nc_version.gen2
    step_sizes = []
    identities = layouts.shared(identity[0:size, 0:size], count)
    for first, lanes in members:
        turned = layouts.channels_first(rows["decay_steps"], first, lanes, identities, exact=True)
        step_sizes.append(tiles.evict(turned, nl.float32))  # [lanes, J * S]
    sums = []
    for _ in range(count):
        sums.append(nl.ndarray((size, width), dtype=nl.float32, buffer=nl.psum))
    for n in range(states):
        h = []
        for k in range(len(members)):
            first, lanes = members[k]
            decay = inputs.decays(step_sizes[k], rates[place + k], n)
            u = layouts.channels_first(written, first, lanes, weights[n])
            if takes_turns and k % 2 == 1:
                u = tiles.evict(u, nl.float32)
            h.append(scan(decay, u, carries[place + k], n))
        for j in range(count):
            turned = nl.ndarray((size, width), dtype=nl.float32, buffer=nl.psum)
            for k in range(len(members)):
                first, lanes = members[k]
                layouts.turn_block(turned[0:size, first : first + lanes], h[k], j * size, identity)
            term = nl.ndarray((size, width), dtype=typed_identity.dtype, buffer=nl.sbuf)
            nisa.activation(dst=term, op=nl.copy, data=turned, scale=reads[0:size, j, n : n + 1])
            layouts.add(sums[j], term, typed_identity)
    return sums


def scan(decay, u, carry, n):
    """h of state n, a new tile like `decay`; its last step goes to carry[:, n], which holds what precedes it."""
    lanes, steps = decay.shape
    h = nl.ndarray((lanes, steps), dtype=nl.float32, buffer=nl.sbuf)
    column = carry[0:lanes, n : n + 1]
    nisa.tensor_tensor_scan(dst=h, data0=decay, data1=u, initial=column, op0=nl.multiply, op1=nl.add)
    nisa.activation(dst=column, op=nl.copy, data=h[0:lanes, steps - 1 : steps])
    return h


def _add_skip(sums, x, skip, identity):
    """Add D x to `sums`; skip: D on all partitions (VectorE, TensorE)."""
    size, count, width = x.shape
    for j in range(count):
        term = nl.ndarray((size, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=term, data1=x[0:size, j, 0:width], data2=skip[0:size, 0:width], op=nl.multiply)
        layouts.add(sums[j], term, identity)
