"""The delta rule, chunk by chunk: a state that corrects what it already predicts. The backward kernel has its own file.

    S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale * q_t^T S_t

    q, k  query and key, K channels        S     state [K, V], reads a value from a key
    v     value, V channels                beta  strength of the write, 0 to 2
    g     log decay <= 0: none, per head, or per key channel

DeltaNet (Yang et al. 2024, arXiv:2406.06484); Gated DeltaNet (arXiv:2412.06464); Kimi Delta Attention
(arXiv:2510.26692). In a chunk of up to 128 steps that starts from S, with the decays D_ts from s to t (D_t0 from the
chunk's start through t, D_Cs from s to its end), L_ts = k_t^T D_ts k_s below the diagonal and M_ts = q_t^T D_ts k_s up
to it,

    w = v - (D_t0 k_t)^T S          z = R w          R = (I + diag(beta) L)^-1 diag(beta)
    o = scale * ((D_t0 q_t)^T S + M z)               S' = D_C0 S + sum_s (D_Cs k_s) z_s^T

R by blocks, never by powers, which are wrong by orders of magnitude when keys are similar: R is known for blocks of n
steps, at first diag(beta) for n = 1; then with L(n) the part of L between the halves of blocks of 2 n steps,

    R <- R - R L(n) R               n = 1, 2, 4, ..., 64

Steps of a chunk lie on partitions (in transposed tiles channels do); `HEADS` heads lie side by side. Products of keys
and queries with each other have their type, all others are float32: with similar keys, sums over a chunk cancel to a
small part of their terms, and rounded terms would show.

    step                                        engine              operands
    load q, k, v, beta, g                       DMA                 HBM -> SBUF [T, heads, channels]
    k^T, q^T                                    TensorE, ScalarE    -> SBUF [K, heads, T]
    decays                                      TensorE, ScalarE    sums of g in PSUM, exp on the way to SBUF
    L^T, M^T                                    TensorE, VectorE    scores in PSUM, times decays -> SBUF [s, heads, t]
    R and R^T, three products a level           TensorE, VectorE    float32, PSUM -> SBUF [t, heads, s], [s, heads, t]
    w, z, o                                     TensorE, ScalarE    sums in PSUM, to SBUF once
    S                                           TensorE, VectorE    float32 in SBUF [K, heads, V]

Limits: K and V up to 128. Columns of V are independent of each other, so wider values are so many heads more, which
share q, k, beta and g. Any T: the last chunk is shorter. The number of instructions grows with B * H * T.
"""

from ssm_nki import chunk_decays, delta_rule_chunk, heads, tiles
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.delta_rule_backward import delta_rule_backward
from ssm_nki.sdk import nisa, nki, nl

__all__ = ["delta_rule_backward", "delta_rule_forward"]


@nki.jit
def delta_rule_forward(q, k, v, beta, log_decay=None, state=None, scale=1.0, keep=False):
    """(o, final state), and with `keep` what the backward kernel takes beside the inputs.

    Args:
        q, k: [B, T, G, K], bfloat16 or float32; G divides H, and H / G neighbouring heads share a key head.
        v: [B, T, H, V] of the same type.
        beta: float32 [B, T, H].
        log_decay: g, float32, finite, [B, T, H] or [B, T, H, K]; None for no decay.
        state: S before the first step, float32 [B, H, K, V]; None for zeros.
        scale: of o, a number.
        keep: return three more tensors: R of each chunk, float32 [B, T, H, min(T, 128)], whose row t has R_ts in column
            s; u = w - L z, float32 [B, T, H, V]; the states that enter chunks, of the type of v [B, chunks, H, K, V].

    Returns:
        o: [B, T, H, V] of the type of v; the final state: float32 [B, H, K, V].
    """
    batch, steps, count, values = v.shape
    channels = k.shape[3]
    masks = _constants(v.dtype, chunk_decays.decay_kind(log_decay))
    out = nl.ndarray(v.shape, dtype=v.dtype, buffer=nl.shared_hbm)
    final = nl.ndarray((batch, count, channels, values), dtype=nl.float32, buffer=nl.shared_hbm)
    kept = _kept(v, channels) if keep else None
    for b in range(batch):
        for first in range(0, count, heads.HEADS):
            last = min(first + heads.HEADS, count)
            if state is None:
                entering = tiles.filled((channels, last - first, values), 0.0, nl.float32)
            else:
                entering = heads.load_state(state[b], first, last)
            for start in range(0, steps, CHUNK):
                place = (b, start, min(start + CHUNK, steps), first, last)
                inputs = _load(q, k, v, beta, log_decay, place)
                entering = _chunk(inputs, entering, masks, scale, place, out, kept)
            heads.store_state(final[b], first, last, entering)
    if kept is not None:
        return out, final, kept["inverse"], kept["errors"], kept["entering"]
    return out, final


def _constants(dtype, kind):
    masks = chunk_decays.constants(dtype, kind, False)
    masks["levels"] = chunk_decays.level_masks(True, nl.float32)
    masks["minus_identity"] = heads.activated(masks["identity"], nl.copy, dtype, -1.0)
    return masks


def _kept(v, channels):
    batch, steps, count, values = v.shape
    chunks = (steps + CHUNK - 1) // CHUNK
    return {
        "inverse": nl.ndarray((batch, steps, count, min(steps, CHUNK)), dtype=nl.float32, buffer=nl.shared_hbm),
        "errors": nl.ndarray(v.shape, dtype=nl.float32, buffer=nl.shared_hbm),
        "entering": nl.ndarray((batch, chunks, count, channels, values), dtype=v.dtype, buffer=nl.shared_hbm),
    }


def _load(q, k, v, beta, log_decay, place):
    """q, k, v [T, heads, channels], beta [T, heads], and g for each head and for each channel, in SBUF."""
    b, start, stop, first, last = place
    count, group = last - first, v.shape[2] // k.shape[2]
    gates, channel_gates = None, None
    if log_decay is not None:
        gates, channel_gates = delta_rule_chunk.load_gates(log_decay[b, start:stop], first, count, k.shape[3])
    return {
        "q": heads.load(q[b, start:stop], first, count, group),
        "k": heads.load(k[b, start:stop], first, count, group),
        "v": heads.load(v[b, start:stop], first, count, 1),
        "beta": tiles.load(beta[b, start:stop, first:last]),
        "gates": gates,
        "channel_gates": channel_gates,
    }


def _chunk(inputs, entering, masks, scale, place, out, kept):
    """Write o of one chunk and what is kept of it; the state that leaves it, float32 [K, heads, V] in SBUF."""
    v, dtype = inputs["v"], inputs["v"].dtype
    steps, count, values = v.shape
    b, start, stop, first, last = place
    k_turned = heads.transposed(inputs["k"], masks["identity"][0:CHUNK, 0, 0:CHUNK], dtype)  # [K, heads, T]
    q_turned = heads.transposed(inputs["q"], masks["identity"][0:CHUNK, 0, 0:CHUNK], dtype)
    pairs = delta_rule_chunk.interactions(
        k_turned, q_turned, inputs["gates"], inputs["channel_gates"], masks, False, nl.float32
    )
    system, mix = pairs["system"], pairs["mix"]  # L^T, M^T: [s, heads, t]
    inverse, turned = _inverse(system, inputs["beta"], masks, kept is not None)
    k_read, q_read, k_written, total = _decayed(inputs, k_turned, q_turned, masks)
    rest = heads.products(k_read, entering)  # in PSUM: -w
    nisa.nc_matmul(dst=rest, stationary=masks["minus_identity"][0:steps, 0, 0:steps], moving=v)
    target = heads.activated(rest, nl.copy, nl.float32, -1.0)  # w [T, heads, V]
    z = heads.activated(heads.products(turned, target), nl.copy, nl.float32)
    result = heads.products(q_read, entering)
    heads.add_products(result, mix, z)
    nisa.dma_copy(dst=out[b, start:stop, first:last], src=heads.activated(result, nl.copy, dtype, scale))
    if kept is not None:
        heads.add_products(rest, system, z)  # in PSUM: -u
        errors = heads.activated(rest, nl.copy, nl.float32, -1.0)
        nisa.dma_copy(dst=kept["errors"][b, start:stop, first:last], src=errors)
        _keep(inverse, heads.as_type(entering, dtype), place, kept)
    written = heads.products(k_written, z)  # [K, heads, V]
    decayed = entering if total is None else heads.scaled(entering, total, nl.float32)
    return heads.combined(decayed, nl.add, written, nl.float32)


def _inverse(system, beta, masks, both):
    """R [t, heads, s], whose last level is left out if not `both`, and R^T [s, heads, t], float32; system: L^T."""
    steps, count = beta.shape
    inverse = heads.spread(masks["unit"][0:steps, 0, 0:steps], beta, nl.float32)
    turned = inverse
    levels = chunk_decays.levels(steps)
    for level in range(levels):
        meetings = heads.repeated(masks["levels"], level, steps, count, steps)
        # The product is L(n) R where a later half meets the earlier half of its block. Elsewhere it is of no use.
        met = heads.combined(heads.products(system, inverse), nl.multiply, meetings, nl.float32)
        turned_change = heads.products(met, turned)  # (R L(n) R)^T
        if both or level + 1 < levels:
            inverse = heads.combined(inverse, nl.subtract, heads.products(turned, met), nl.float32)
        turned = heads.combined(turned, nl.subtract, turned_change, nl.float32)
    return inverse, turned


def _decayed(inputs, k_turned, q_turned, masks):
    """k and q decayed from the start of the chunk [K, heads, T], k decayed to its end [T, heads, K], and the decay of
    the whole chunk [K, heads] or None where there is none; all float32.
    """
    k, gates = inputs["k"], inputs["channel_gates"]
    if gates is None:
        k_read, q_read = heads.as_type(k_turned, nl.float32), heads.as_type(q_turned, nl.float32)
        return k_read, q_read, heads.as_type(k, nl.float32), None
    steps = k.shape[0]
    until, after = masks["until"][0:steps, 0, 0:steps], masks["after"][0:steps, 0, 0:steps]
    from_start = chunk_decays.turned_factors(until, gates, nl.float32)
    k_read = heads.combined(k_turned, nl.multiply, from_start, nl.float32)
    q_read = heads.combined(q_turned, nl.multiply, from_start, nl.float32)
    k_written = heads.combined(k, nl.multiply, chunk_decays.factors(after, gates, nl.float32), nl.float32)
    return k_read, q_read, k_written, chunk_decays.total(gates, masks["until"])


def _keep(inverse, entering, place, kept):
    """Write R, filled up with zeros to the width that all chunks have, and the state that enters the chunk."""
    b, start, stop, first, last = place
    steps, width = stop - start, kept["inverse"].shape[3]
    nisa.dma_copy(dst=kept["inverse"][b, start:stop, first:last, 0:steps], src=inverse)
    if steps < width:
        zeros = tiles.filled((steps, last - first, width - steps), 0.0, inverse.dtype)
        nisa.dma_copy(dst=kept["inverse"][b, start:stop, first:last, steps:width], src=zeros)
    heads.store_state(kept["entering"][b, start // CHUNK], first, last, entering)
