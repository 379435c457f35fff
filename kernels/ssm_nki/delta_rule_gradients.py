"""How gradients pass through the decays of a chunk of the delta rule, to q, k and g: parts of its backward kernel.

A decay multiplies q or k and has a sum of g as its exponent, at three places (see ssm_nki.delta_rule_backward). Sums of
all that q, k and the exponents get stand in PSUM, [T, heads, K], by the names q, k and exponents; the last are there
only if there are decays, and row r has the sum over all exponents that contain g_r. A decay per head has all channels
of its head in its row, whose sum is its gradient.

turned, tiles by name: z, grad_out, minus_grad_v [V, heads, T]; state, leaving [V, heads, K].
"""

from ssm_nki import chunk_decays, heads, tiles
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.sdk import nisa, nl


def turn(tile, masks):
    """Each head transposed, float32 in SBUF."""
    return heads.transposed(tile, masks["unit"][0:CHUNK, 0, 0:CHUNK], nl.float32)


def ends_back(inputs, turned, from_start, to_end, masks):
    """Sums in PSUM [T, heads, K] of what q, k and the exponents that contain each g get through the reads of the state
    and the writes to it; others add to them.
    """
    q, k, steps = inputs["q"], inputs["k"], inputs["k"].shape[0]
    sums = {
        "q": nl.ndarray(k.shape, dtype=nl.float32, buffer=nl.psum),
        "k": nl.ndarray(k.shape, dtype=nl.float32, buffer=nl.psum),
    }
    if from_start is None:
        heads.add_products(sums["q"], turned["grad_out"], turned["state"])
        heads.add_products(sums["k"], turned["minus_grad_v"], turned["state"])
        heads.add_products(sums["k"], turned["z"], turned["leaving"])
        return sums
    sums["exponents"] = nl.ndarray(k.shape, dtype=nl.float32, buffer=nl.psum)
    since, before = masks["since"][0:steps, 0, 0:steps], masks["before"][0:steps, 0, 0:steps]
    _pass_back(heads.products(turned["grad_out"], turned["state"]), q, from_start, since, sums["q"], masks, sums)
    _pass_back(heads.products(turned["minus_grad_v"], turned["state"]), k, from_start, since, sums["k"], masks, sums)
    _pass_back(heads.products(turned["z"], turned["leaving"]), k, to_end, before, sums["k"], masks, sums)
    return sums


def _pass_back(product, x, decays, counted, grad, masks, sums):
    """Of y = x * decays, whose gradient is `product`, [T, heads, K] in PSUM: add to `grad` that of x, and to
    the exponents that of each g; counted[t, r] is 1 where g_r is in the exponent of t.
    """
    steps = x.shape[0]
    part = heads.combined(product, nl.multiply, decays, nl.float32)
    nisa.nc_matmul(dst=grad, stationary=masks["unit"][0:steps, 0, 0:steps], moving=part, is_stationary_onezero=True)
    terms = heads.combined(x, nl.multiply, part, nl.float32)
    nisa.nc_matmul(dst=sums["exponents"], stationary=counted, moving=terms, is_stationary_onezero=True)


def pairs_back(inputs, pairs, turned, masks, sums):
    """Add what q, k and the exponents get through L and M, where all channels of a head decay alike."""
    q, k = inputs["q"], inputs["k"]
    grad_mix = heads.products(turned["grad_out"], turned["z"])  # [t, heads, s]
    grad_mix = heads.combined(grad_mix, nl.multiply, pairs["present"], nl.float32)
    grad_system = heads.products(turned["minus_grad_v"], turned["z"])
    grad_system = heads.combined(grad_system, nl.multiply, pairs["strict"], nl.float32)
    heads.add_products(sums["q"], turn(grad_mix, masks), k)
    heads.add_products(sums["k"], turn(grad_system, masks), k)
    heads.add_products(sums["k"], grad_system, k)
    heads.add_products(sums["k"], grad_mix, q)
    if "exponents" in sums:
        through_mix = heads.combined(pairs["q_scores"], nl.multiply, grad_mix, nl.float32)
        through_system = heads.combined(pairs["k_scores"], nl.multiply, grad_system, nl.float32)
        chunk_decays.add_pair_sums(sums["exponents"], (through_mix, through_system), masks)


def levels_back(inputs, turned, masks, sums):
    """Add what q, k and the exponents get through L and M, where each channel has a decay: level by level."""
    q, k, gates = inputs["q"], inputs["k"], inputs["channel_gates"]
    steps, count = k.shape[0], k.shape[1]
    grad_mix = heads.products(turned["grad_out"], turned["z"])  # [t, heads, s]
    present = heads.combined(grad_mix, nl.multiply, heads.repeated(masks["unit"], 0, steps, count, steps), nl.float32)
    heads.add_products(sums["q"], present, k)
    heads.add_products(sums["k"], present, q)
    grad_mix = heads.activated(grad_mix, nl.copy, nl.float32)
    grad_mix_turned = heads.activated(heads.products(turned["z"], turned["grad_out"]), nl.copy, nl.float32)
    grad_system = _symmetric(turned["minus_grad_v"], turned["z"], masks)
    for level in range(chunk_decays.levels(steps)):
        later = heads.repeated(masks["later"], level, steps, count, steps)  # [t, heads, s]
        earlier = heads.repeated(masks["earlier"], level, steps, count, steps)  # [s, heads, t]
        both = heads.repeated(masks["both"], level, steps, count, steps)
        weights = masks["weights"][0:steps, level, 0:steps]
        counted = masks["turned_weights"][0:steps, level, 0:steps]
        decays = chunk_decays.factors(weights, gates, nl.float32)
        k_level = heads.combined(k, nl.multiply, decays, nl.float32)
        q_level = heads.combined(q, nl.multiply, decays, nl.float32)
        grad_k = heads.products(heads.combined(grad_system, nl.multiply, both, nl.float32), k_level)
        heads.add_products(grad_k, heads.combined(grad_mix, nl.multiply, later, nl.float32), q_level)
        grad_q = heads.products(heads.combined(grad_mix_turned, nl.multiply, earlier, nl.float32), k_level)
        _pass_back(grad_k, k, decays, counted, sums["k"], masks, sums)
        _pass_back(grad_q, q, decays, counted, sums["q"], masks, sums)


def _symmetric(a_turned, b_turned, masks):
    """The part of a b^T below the diagonal, and its mirror image above, as a new tile [T, heads, T] in SBUF; a and b:
    [V, heads, T].
    """
    steps, count = a_turned.shape[2], a_turned.shape[1]
    below = heads.repeated(masks["strict"], 0, steps, count, steps)
    above = heads.repeated(masks["before"], 0, steps, count, steps)
    lower = heads.combined(heads.products(a_turned, b_turned), nl.multiply, below, nl.float32)
    upper = heads.combined(heads.products(b_turned, a_turned), nl.multiply, above, nl.float32)
    return heads.combined(lower, nl.add, upper, nl.float32)


def total_back(agreement, total, masks, exponents):
    """Add what every exponent gets through the decay of the state; agreement: dS' * S, [K, heads, V]."""
    channels, count = total.shape
    steps = exponents.shape[0]
    grad_total = heads.combined(heads.summed(agreement), nl.multiply, total, nl.float32)
    diagonal = heads.spread(masks["unit"][0:channels, 0, 0:channels], grad_total, nl.float32)
    ones = tiles.filled((channels, steps), 1.0, nl.float32)
    nisa.nc_matmul(dst=exponents, stationary=ones, moving=diagonal, is_stationary_onezero=True)
