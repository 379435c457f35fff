"""Gradients of linear attention with a decay per key channel, in one chunk. See ssm_nki.linear_attention_backward."""

from ssm_nki import chunk_decays, heads, tiles
from ssm_nki import linear_attention_chunk as chunk
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.sdk import nisa, nl


def gradients(block, part, masks):
    """The gradients of v [T, heads, V], log_decay [T, heads, K] and S [K, heads, V] of a part.

    Those of q and k go to the block.
    """
    dtype = block["k"].dtype
    steps, count, channels = block["k"].shape
    grad_gates = nl.ndarray((steps, count, channels), dtype=nl.float32, buffer=nl.psum)
    grad_reader = _over_values(part["grad_out_turned"], part["state_turned"], (steps, count, channels))
    reader = _decayed(block, "q", "until", grad_reader, grad_gates, "since", masks)  # D_t0 q_t
    grad_writer = _over_values(part["v_turned"], part["leaving_turned"], (steps, count, channels))
    writer = _decayed(block, "k", "after", grad_writer, grad_gates, "before", masks)  # D_Cs k_s

    total = chunk_decays.total(block["gates"], masks["until"])
    of_state = heads.summed(heads.combined(part["state"], nl.multiply, part["short_leaving"], dtype))
    of_state = heads.combined(of_state, nl.multiply, total, nl.float32)
    of_state = heads.spread(masks["unit"][0:channels, 0, 0:channels], of_state, nl.float32)
    nisa.nc_matmul(dst=grad_gates, stationary=masks["ones"][0:channels, 0, 0:steps], moving=of_state)

    mix = _between_steps(block, part, grad_gates, masks)
    grad_v = heads.products(mix, part["grad_out"])
    writer = heads.transposed(writer, masks["identity"][0:CHUNK, 0, 0:CHUNK], dtype)
    heads.add_products(grad_v, writer, part["short_leaving"])
    decayed = heads.scaled(part["leaving"], total, nl.float32)
    return {
        "v": heads.activated(grad_v, nl.copy, dtype),
        "state": heads.combined(decayed, nl.add, heads.products(reader, part["grad_out"]), nl.float32),
        "log_decay": tiles.evict(grad_gates, nl.float32),
    }


def _decayed(block, name, terms, grad, grad_gates, counting, masks):
    """x = D q or D k, `name`, with the decays of the `terms` of each step; adds to gradients what q or k, and g, get.

    grad: the gradient of x, in PSUM; masks[counting]: 1 where a step's exponent (row) contains g_r (column).
    """
    plain, gates = block[name], block["gates"]
    steps, dtype = plain.shape[0], plain.dtype
    decays = chunk_decays.factors(masks[terms][0:steps, 0, 0:steps], gates, dtype)
    grad_plain = heads.combined(grad, nl.multiply, decays, dtype)
    nisa.nc_matmul(dst=block["grads"][name], stationary=masks["identity"][0:steps, 0, 0:steps], moving=grad_plain)
    grad_exponents = heads.combined(grad_plain, nl.multiply, plain, dtype)
    nisa.nc_matmul(dst=grad_gates, stationary=masks[counting][0:steps, 0, 0:steps], moving=grad_exponents)
    return heads.combined(plain, nl.multiply, decays, dtype)


def _over_values(stationary, moving, shape):
    """A new float32 tile in PSUM of `shape`, [M, heads, N]: products over values, see chunk.add_over_values."""
    sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    chunk.add_over_values(sums, stationary, moving, shape[1])
    return sums


def _between_steps(block, part, grad_gates, masks):
    """M, a new tile [t, heads, s] in SBUF; adds what q, k and g get through it to their gradients."""
    q, k, gates = block["q"], block["k"], block["gates"]
    dtype = k.dtype
    steps, count, channels = k.shape
    square = (steps, count, steps)
    unit = heads.repeated(masks["unit"], 0, steps, count, steps)
    mix = heads.combined(block["scores"], nl.multiply, unit, nl.float32)
    grad_mix = _over_values(part["grad_out_turned"], part["v_turned"], square)
    own = heads.combined(grad_mix, nl.multiply, unit, dtype)
    heads.add_products(block["grads"]["q"], own, k)
    heads.add_products(block["grads"]["k"], own, q)
    before = heads.repeated(masks["strict"], 0, steps, count, steps)
    both = heads.combined(grad_mix, nl.multiply, before, nl.float32)  # dM of readers t; next, of writers s
    nisa.tensor_copy_predicated(
        dst=both,
        src=_over_values(part["v_turned"], part["grad_out_turned"], square),
        predicate=heads.repeated(masks["writes"], 0, steps, count, steps),
    )
    both = heads.as_type(both, dtype)  # [t, heads, s], symmetric
    for level in range(chunk_decays.levels(steps)):
        later, earlier = masks["later"][0:steps, level, 0:steps], masks["earlier"][0:steps, level, 0:steps]
        decays = chunk_decays.factors(masks["weights"][0:steps, level, 0:steps], gates, dtype)
        plain = nl.ndarray((steps, count, channels), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=plain, stationary=later, moving=q)
        nisa.nc_matmul(dst=plain, stationary=earlier, moving=k)
        decayed = heads.combined(plain, nl.multiply, decays, dtype)
        turned = heads.transposed(decayed, masks["identity"][0:CHUNK, 0, 0:CHUNK], dtype)
        pairs = heads.repeated(masks["pairs"], level, steps, count, steps)
        nisa.tensor_copy_predicated(dst=mix, src=heads.products(turned, turned), predicate=pairs)

        pairs = masks["both_ways"][0:steps, level, 0:count, 0:steps]
        met = heads.combined(both, nl.multiply, pairs, dtype)
        grad_decayed = heads.activated(heads.products(met, decayed), nl.copy, dtype)
        grad_plain = heads.combined(grad_decayed, nl.multiply, decays, dtype)
        nisa.nc_matmul(dst=block["grads"]["q"], stationary=later, moving=grad_plain)
        nisa.nc_matmul(dst=block["grads"]["k"], stationary=earlier, moving=grad_plain)
        grad_exponents = heads.combined(grad_decayed, nl.multiply, decayed, dtype)
        weights = masks["turned_weights"][0:steps, level, 0:steps]
        nisa.nc_matmul(dst=grad_gates, stationary=weights, moving=grad_exponents)
    return heads.as_type(mix, dtype)
