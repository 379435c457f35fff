"""Decays between the steps of a chunk, from log decays g <= 0 [T, H, K], time on partitions.

The decay from step s to step t is D_ts = exp(g_{s+1} + ... + g_t). Each exponent is a sum of its own terms, a product
with a 0/1 matrix on TensorE; it is never the difference of two cumulative sums, which would lose what weak decays
contribute after strong ones. No exponent is positive.

* To and from the ends of the chunk: exp(sum over r <= t of g_r) and exp(sum over r > s of g_r), `factors`.
* Between steps, one decay per head: sums[t, s] = sum_r [r <= t] ([r > s] g_r), one product per head, `pair_decays`.
* Between steps, a decay per key channel: sum_k x_t[k] D_ts[k] y_s[k] is a product of matrices only after D is split in
  two factors. A block of 2 n steps is halved: a pair with t in its later and s in its earlier half meets at the middle,
  D_ts = exp(sum from the middle to t) exp(sum from s to the middle). Every pair s < t meets in one block at one level
  n = 1, 2, 4, ..., 64; a level's factors, of later and of earlier steps, fill one tile, `level_weights` (the secondary
  chunks of Gated Linear Attention, arXiv:2312.06635, section 4.3, down to single steps).

The level of a pair is the position of the highest bit in which s and t differ.
"""

from ssm_nki import heads, tiles
from ssm_nki.sdk import nisa, nl

CHUNK = 128  # steps: as many as there are partitions
LEVELS = 7  # CHUNK = 2**LEVELS
NEVER = -1.0e30  # added to an exponent: exp gives 0


def decay_kind(log_decay):
    """ "none", "head" or "channel", by the dimensions of log_decay: None, [B, T, H] or [B, T, H, K]."""
    if log_decay is None:
        return "none"
    return "head" if len(log_decay.shape) == 3 else "channel"


def square(keep, dtype):
    """A new stack [CHUNK, 1, CHUNK] in SBUF of one mask: see ssm_nki.tiles.mask."""
    return tiles.mask(CHUNK, dtype, keep).reshape((CHUNK, 1, CHUNK))


def constants(dtype, kind, row_is_later):
    """Masks in SBUF by name, each a stack [CHUNK, layers, CHUNK]; `row_is_later`: of pairs, the later step has
    the row.

    identity is of type `dtype`; until and after are [r <= column] and [r > column] of row r, float32.
    """
    found = {
        "identity": square(nl.equal, dtype),
        "unit": square(nl.equal, nl.float32),
        "until": square(nl.greater_equal, nl.float32),
        "after": square(nl.less, nl.float32),
        "strict": square(nl.less if row_is_later else nl.greater, nl.float32),
    }
    if kind == "none":
        found["present"] = square(nl.less_equal if row_is_later else nl.greater_equal, nl.float32)
    if kind == "head":
        found["short_identity"] = square(nl.equal, nl.bfloat16)
        found["forbidden"] = square(nl.greater if row_is_later else nl.less, nl.bfloat16)
        nisa.tensor_scalar(dst=found["forbidden"], data=found["forbidden"], op0=nl.multiply, operand0=NEVER)
    if kind == "channel":
        found["weights"] = level_weights()
        found["pairs"] = level_masks(row_is_later, nl.uint8)
    return found


def level_masks(row_is_later, dtype):
    """A new stack [CHUNK, LEVELS, CHUNK] in SBUF: 1 where row and column are a pair of that level (GpSimd, VectorE).

    The later step of the pair is the row, or else the column.
    """
    differing = _differing_bits()
    ordered = tiles.mask(CHUNK, nl.float32, nl.less if row_is_later else nl.greater)
    masks = nl.ndarray((CHUNK, LEVELS, CHUNK), dtype=dtype, buffer=nl.sbuf)
    below = nl.ndarray((CHUNK, CHUNK), dtype=nl.float32, buffer=nl.sbuf)
    for level in range(LEVELS):
        nisa.scalar_tensor_tensor(
            dst=below,
            data=differing,
            op0=nl.less,
            operand0=float(2 << level),
            op1=nl.multiply,
            operand1=ordered,
        )
        nisa.scalar_tensor_tensor(
            dst=masks[0:CHUNK, level, 0:CHUNK],
            data=differing,
            op0=nl.greater_equal,
            operand0=float(1 << level),
            op1=nl.multiply,
            operand1=below,
        )
    return masks


def level_halves(dtype):
    """Two new stacks [CHUNK, LEVELS, CHUNK] in SBUF: the identity where a step is in the later half of its block at
    that level, and where it is in the earlier.
    """
    identity = tiles.mask(CHUNK, nl.float32, nl.equal)
    steps = _positions(0, 1)
    later = nl.ndarray((CHUNK, LEVELS, CHUNK), dtype=dtype, buffer=nl.sbuf)
    earlier = nl.ndarray((CHUNK, LEVELS, CHUNK), dtype=dtype, buffer=nl.sbuf)
    for level in range(LEVELS):
        later_half = _in_later_half(steps, level)
        nisa.tensor_tensor(dst=later[0:CHUNK, level, 0:CHUNK], data1=later_half, data2=identity, op=nl.multiply)
        nisa.tensor_tensor(
            dst=earlier[0:CHUNK, level, 0:CHUNK], data1=identity, data2=later[0:CHUNK, level, 0:CHUNK], op=nl.subtract
        )
    return later, earlier


def level_weights():
    """A new float32 stack [CHUNK, LEVELS, CHUNK] in SBUF: 1 where row r counts in the exponent of step t, the column.

    Of t in the later half of its block: r from the middle to t; in the earlier: r after t, to the middle.
    """
    differing = _differing_bits()
    after = tiles.mask(CHUNK, nl.float32, nl.less)  # r > t
    until = tiles.mask(CHUNK, nl.float32, nl.greater_equal)  # r <= t
    change = heads.combined(until, nl.subtract, after, nl.float32)
    steps = _positions(0, 1)
    weights = nl.ndarray((CHUNK, LEVELS, CHUNK), dtype=nl.float32, buffer=nl.sbuf)
    chosen = nl.ndarray((CHUNK, CHUNK), dtype=nl.float32, buffer=nl.sbuf)
    for level in range(LEVELS):
        later_half = _in_later_half(steps, level)
        nisa.tensor_tensor(dst=chosen, data1=later_half, data2=change, op=nl.multiply)
        nisa.tensor_tensor(dst=chosen, data1=chosen, data2=after, op=nl.add)
        nisa.scalar_tensor_tensor(
            dst=weights[0:CHUNK, level, 0:CHUNK],
            data=differing,
            op0=nl.less,
            operand0=float(1 << level),
            op1=nl.multiply,
            operand1=chosen,
        )  # r and t are in the same half
    return weights


def _positions(row, column):
    """A new int32 tile [CHUNK, CHUNK] in SBUF: row * its row + column * its column (GpSimd)."""
    tile = nl.ndarray((CHUNK, CHUNK), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=tile, pattern=[[column, CHUNK]], offset=0, channel_multiplier=row)
    return tile


def _in_later_half(steps, level):
    """A new int32 tile [CHUNK, CHUNK] in SBUF: 1 where a step is in the later half of its block at that level."""
    bit = nl.ndarray((CHUNK, CHUNK), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bit, data=steps, op0=nl.right_shift, operand0=level, op1=nl.bitwise_and, operand1=1)
    return bit


def _differing_bits():
    """A new int32 tile [CHUNK, CHUNK] in SBUF: row xor column."""
    return heads.combined(_positions(1, 0), nl.bitwise_xor, _positions(0, 1), nl.int32)


def factors(weights, gates, dtype):
    """A new tile [T, H, K] in SBUF as `dtype`: exp(sum_r weights[r, t] g_r), for weights [R, T] of 0 and 1.

    gates: g, float32 [R, H, K].
    """
    sums = nl.ndarray((weights.shape[1], gates.shape[1], gates.shape[2]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=weights, moving=gates, is_stationary_onezero=True)
    return heads.activated(sums, nl.exp, dtype)


def turned_factors(weights, gates, dtype):
    """The same with channels on partitions, [K, H, T]."""
    rows, count, channels = gates.shape
    steps = weights.shape[1]
    sums = nl.ndarray((channels, count, steps), dtype=nl.float32, buffer=nl.psum)
    for h in range(count):
        nisa.nc_matmul(
            dst=sums[0:channels, h, 0:steps],
            stationary=gates[0:rows, h, 0:channels],
            moving=weights,
            is_moving_onezero=True,
        )
    return heads.activated(sums, nl.exp, dtype)


def total(gates, until):
    """A new float32 tile [K, H] in SBUF: the decay of all steps together, exp(sum_r g_r); until: r <= column."""
    steps, count, channels = gates.shape
    decays = turned_factors(until[0:steps, 0, steps - 1 : steps], gates, nl.float32)
    return decays.reshape((channels, count))


def pair_decays(gates, first, count, masks, row_is_later, dtype):
    """A new tile [T, count, T] in SBUF as `dtype`: the decays between steps, from the heads of gates, g [T, H], from
    `first` on (GpSimd, TensorE, ScalarE).

    Rows are the later steps and columns the earlier, or the other way round; 0 where the earlier step is the later.
    masks: see `constants`.
    """
    steps = gates.shape[0]
    of_row = masks["until"] if row_is_later else masks["after"]  # which terms of a sum count for the row
    terms = nl.ndarray((steps, count, steps), dtype=nl.float32, buffer=nl.sbuf)  # that count for the column
    nisa.affine_select(
        dst=terms,
        pattern=[[0, count], [1, steps]],
        offset=0,
        channel_multiplier=-1,
        on_true_tile=heads.widened(gates, first, count, steps),
        on_false_value=0.0,
        cmp_op=nl.less if row_is_later else nl.greater_equal,
    )
    sums = nl.ndarray((steps, count, steps), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, count, heads.HEADS):
        stop = min(start + heads.HEADS, count)
        some = sums[0:steps, start:stop, 0:steps]
        nisa.nc_matmul(
            dst=some,
            stationary=of_row[0:steps, 0, 0:steps],
            moving=terms[0:steps, start:stop, 0:steps],
            is_stationary_onezero=True,
        )
        nisa.nc_matmul(
            dst=some,
            stationary=masks["short_identity"][0:steps, 0, 0:steps],
            moving=heads.repeated(masks["forbidden"], 0, steps, stop - start, steps),
        )
    return heads.activated(sums, nl.exp, dtype)


def levels(steps):
    """How many levels the pairs of `steps` steps have: the least n with 2**n >= steps."""
    count = 0
    while 1 << count < steps:
        count = count + 1
    return count


def head_factors(weights, gates, buffer):
    """A new float32 tile [M, H] in `buffer`: exp(sum_r weights[r, m] g_r), for weights [R, M] of 0 and 1.

    gates: g, float32 [R, H].
    """
    sums = nl.ndarray((weights.shape[1], gates.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=weights, moving=gates, is_stationary_onezero=True)
    decays = nl.ndarray(sums.shape, dtype=nl.float32, buffer=buffer)
    nisa.activation(dst=decays, op=nl.exp, data=sums)
    return decays


def add_pair_sums(sums, pairs, masks):
    """Add to the first column of sums[r, H, F], in PSUM, what g_r gets through the exponents of pairs s < r <= t.

    pairs: their gradients, tiles [t, H, s] to be added up. masks, of the same type: "since" is [r <= t] of row t and
    column r, "before" is [s < r] of row s and column r.
    """
    steps, count = pairs[0].shape[0], pairs[0].shape[1]
    dtype = pairs[0].dtype
    from_step = nl.ndarray((steps, count, steps), dtype=nl.float32, buffer=nl.psum)  # [s, H, r]: sums over t >= r
    for h in range(count):
        for grads in pairs:
            nisa.nc_matmul(
                dst=from_step[0:steps, h, 0:steps],
                stationary=grads[0:steps, h, 0:steps],
                moving=masks["since"][0:steps, 0, 0:steps],
                is_moving_onezero=True,
            )
    from_step = heads.combined(from_step, nl.multiply, heads.repeated(masks["before"], 0, steps, count, steps), dtype)
    ones = tiles.filled((steps, 1), 1.0, dtype)
    for h in range(count):
        nisa.nc_matmul(
            dst=sums[0:steps, h, 0:1],
            stationary=from_step[0:steps, h, 0:steps],
            moving=ones,
            is_moving_onezero=True,
        )
