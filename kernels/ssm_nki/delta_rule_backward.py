"""Gradients of the delta rule, chunk by chunk, from the last to the first. ssm_nki.delta_rule has the recurrence.

With dX the gradient of X, S the state that enters the chunk, dS' that of the state which leaves it, and do times scale,

    dz = M^T do + (D_Cs k_s)^T dS'          dw = dv = R^T dz           y = dz - L^T dv
    dbeta_t = y_t . u_t                     u = w - L z,  z = beta u
    dS = D_C0 dS' + sum_t (D_t0 q_t) do_t^T - (D_t0 k_t) dv_t^T
    dM = do z^T for s <= t                  dL = -dv z^T for s < t

R, u and S are those that the forward kernel kept, so nothing is inverted again; L and M are computed again, and so are
the decays. What k, q and g get goes through the three places where a decay D and its exponent, a sum of g, appear:

    from the chunk's start   d(D_t0 q_t) = S do_t,  d(D_t0 k_t) = -S dv_t
    to its end               d(D_Cs k_s) = dS' z_s
    between two steps        dq_t += sum_s dM_ts D_ts k_s, ...; the exponent of D_ts gets dM_ts M_ts + dL_ts L_ts

and g_r gets the sum over all exponents that contain it, which is one product with a 0/1 matrix for each place: no
difference of sums, so that the gradient of a strong decay is as small as it should be. With a decay per channel, D
between two steps is split as ssm_nki.chunk_decays does, level by level.

Layout and limits are those of the forward kernel, except that L, M and R have t on partitions, and that all products
are float32.

    step                                        engine              operands
    load do, q, k, beta, g, R, u, S             DMA, ScalarE        HBM -> SBUF, as float32
    q^T, k^T, z^T, do^T, dv^T, S^T, dS'^T       TensorE, ScalarE    -> SBUF, with channels on partitions
    decays, L, M                                as in the forward kernel
    dz, dv, y                                   TensorE, ScalarE    sums in PSUM [T, heads, V] -> SBUF
    dbeta                                       VectorE             products, summed over V
    dM, dL, times decays                        TensorE, VectorE    PSUM -> SBUF [t, heads, s]
    dq, dk                                      TensorE, ScalarE    sums in PSUM [T, heads, K], to SBUF once
    gradients of exponents, of g                VectorE, TensorE    products with 0/1 matrices, sums in PSUM
    dS                                          TensorE, VectorE    float32 in SBUF [K, heads, V]
"""

from ssm_nki import chunk_decays, delta_rule_chunk, delta_rule_gradients, heads, tiles
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.sdk import nisa, nki, nl


@nki.jit
def delta_rule_backward(grad_out, grad_final, q, k, beta, inverse, errors, entering, log_decay=None, scale=1.0):
    """The gradients of q, k, v, beta, log_decay (left out where that is None) and of the initial state.

    Args:
        grad_out: [B, T, H, V] of the type of q.
        grad_final: gradient of the final state, float32 [B, H, K, V].
        q, k, beta, log_decay, scale: as for the forward kernel.
        inverse, errors, entering: what the forward kernel returned with `keep`.

    Returns:
        Gradients of q and k for each value head, [B, T, H, K] of their type (those of heads that share a key head are
        to be added); of v, [B, T, H, V] of its type; of beta and log_decay, in their shape, and of the state, float32.
    """
    batch, steps, count, values = grad_out.shape
    channels = k.shape[3]
    dtype = k.dtype
    masks = _constants(chunk_decays.decay_kind(log_decay))
    grads = {
        "q": nl.ndarray((batch, steps, count, channels), dtype=dtype, buffer=nl.shared_hbm),
        "k": nl.ndarray((batch, steps, count, channels), dtype=dtype, buffer=nl.shared_hbm),
        "v": nl.ndarray((batch, steps, count, values), dtype=dtype, buffer=nl.shared_hbm),
        "beta": nl.ndarray((batch, steps, count), dtype=nl.float32, buffer=nl.shared_hbm),
    }
    if log_decay is not None:
        grads["log_decay"] = nl.ndarray(log_decay.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    grad_initial = nl.ndarray((batch, count, channels, values), dtype=nl.float32, buffer=nl.shared_hbm)
    chunks = entering.shape[1]
    for b in range(batch):
        for first in range(0, count, heads.HEADS):
            last = min(first + heads.HEADS, count)
            leaving = heads.load_state(grad_final[b], first, last)
            for i in range(chunks):
                start = (chunks - 1 - i) * CHUNK
                place = (b, start, min(start + CHUNK, steps), first, last)
                inputs = _load(grad_out, q, k, beta, log_decay, inverse, errors, entering, scale, place)
                leaving = _chunk(inputs, leaving, masks, place, grads)
            heads.store_state(grad_initial[b], first, last, leaving)
    if log_decay is None:
        return grads["q"], grads["k"], grads["v"], grads["beta"], grad_initial
    return grads["q"], grads["k"], grads["v"], grads["beta"], grads["log_decay"], grad_initial


def _constants(kind):
    """Masks by name, and of each level's weights the transposes."""
    masks = chunk_decays.constants(nl.float32, kind, True)
    masks["since"] = chunk_decays.square(nl.less_equal, nl.float32)  # row t, column r: r <= t
    masks["before"] = chunk_decays.square(nl.greater, nl.float32)  # row s, column r: s < r
    if kind == "channel":
        masks["later"] = chunk_decays.level_masks(True, nl.float32)
        masks["earlier"] = chunk_decays.level_masks(False, nl.float32)
        masks["both"] = heads.combined(masks["later"], nl.add, masks["earlier"], nl.float32)
        unit = masks["unit"][0:CHUNK, 0, 0:CHUNK]
        weights = masks["weights"]
        turned = nl.ndarray(weights.shape, dtype=nl.float32, buffer=nl.sbuf)
        for level in range(chunk_decays.LEVELS):
            part = tiles.matmul(weights[0:CHUNK, level, 0:CHUNK], unit)
            nisa.activation(dst=turned[0:CHUNK, level, 0:CHUNK], op=nl.copy, data=part)
        masks["turned_weights"] = turned
    return masks


def _load(grad_out, q, k, beta, log_decay, inverse, errors, entering, scale, place):
    """What a chunk needs, as float32 in SBUF; grad_out times scale."""
    b, start, stop, first, last = place
    count, group = last - first, beta.shape[2] // k.shape[2]
    gates, channel_gates = None, None
    if log_decay is not None:
        gates, channel_gates = delta_rule_chunk.load_gates(log_decay[b, start:stop], first, count, k.shape[3])
    steps = stop - start
    return {
        "grad_out": heads.activated(heads.load(grad_out[b, start:stop], first, count, 1), nl.copy, nl.float32, scale),
        "q": heads.as_type(heads.load(q[b, start:stop], first, count, group), nl.float32),
        "k": heads.as_type(heads.load(k[b, start:stop], first, count, group), nl.float32),
        "beta": tiles.load(beta[b, start:stop, first:last]),
        "gates": gates,
        "channel_gates": channel_gates,
        "inverse": heads.load(inverse[b, start:stop, 0 : inverse.shape[2], 0:steps], first, count, 1),
        "errors": heads.load(errors[b, start:stop], first, count, 1),
        "state": heads.as_type(heads.load_state(entering[b, start // CHUNK], first, last), nl.float32),
    }


def _chunk(inputs, leaving, masks, place, grads):
    """Write the gradients of one chunk; that of the state which enters it, float32 [K, heads, V] in SBUF.

    leaving: the gradient of the state that leaves it, float32 [K, heads, V].
    """
    b, start, stop, first, last = place
    k, q, beta, errors = inputs["k"], inputs["q"], inputs["beta"], inputs["errors"]
    k_turned, q_turned = delta_rule_gradients.turn(k, masks), delta_rule_gradients.turn(q, masks)  # [K, heads, T]
    pairs = delta_rule_chunk.interactions(
        k_turned, q_turned, inputs["gates"], inputs["channel_gates"], masks, True, nl.float32
    )
    k_read, q_read, k_written, from_start, to_end, total = _decayed(inputs, k_turned, masks)

    grad_z = heads.products(pairs["mix"], inputs["grad_out"])  # [T, heads, V]
    heads.add_products(grad_z, k_written, leaving)
    grad_v = heads.products(inputs["inverse"], heads.activated(grad_z, nl.copy, nl.float32))
    _write(grad_v, place, grads["v"])
    minus_grad_v = heads.activated(grad_v, nl.copy, nl.float32, -1.0)
    heads.add_products(grad_z, pairs["system"], minus_grad_v)  # y
    grad_beta = heads.summed(heads.combined(grad_z, nl.multiply, errors, nl.float32))
    nisa.dma_copy(dst=grads["beta"][b, start:stop, first:last], src=grad_beta)

    turned = {
        "z": delta_rule_gradients.turn(heads.scaled(errors, beta, nl.float32), masks),  # [V, heads, T]
        "grad_out": delta_rule_gradients.turn(inputs["grad_out"], masks),
        "minus_grad_v": delta_rule_gradients.turn(minus_grad_v, masks),
        "state": delta_rule_gradients.turn(inputs["state"], masks),  # [V, heads, K]
        "leaving": delta_rule_gradients.turn(leaving, masks),
    }
    sums = delta_rule_gradients.ends_back(inputs, turned, from_start, to_end, masks)
    if "pairs" in masks:
        delta_rule_gradients.levels_back(inputs, turned, masks, sums)
    else:
        delta_rule_gradients.pairs_back(inputs, pairs, turned, masks, sums)
    _write(sums["q"], place, grads["q"])
    _write(sums["k"], place, grads["k"])
    if total is not None:
        delta_rule_gradients.total_back(
            heads.combined(leaving, nl.multiply, inputs["state"], nl.float32), total, masks, sums["exponents"]
        )
        _write_grad_decay(sums["exponents"], place, grads["log_decay"])
        leaving = heads.scaled(leaving, total, nl.float32)
    arriving = heads.products(q_read, inputs["grad_out"])  # [K, heads, V]
    heads.add_products(arriving, k_read, minus_grad_v)
    return heads.combined(leaving, nl.add, arriving, nl.float32)


def _write(sums, place, grad):
    """Write a tile in PSUM to its place in grad [B, T, H, channels] in HBM, in the type of that."""
    b, start, stop, first, last = place
    nisa.dma_copy(dst=grad[b, start:stop, first:last], src=heads.activated(sums, nl.copy, grad.dtype))


def _decayed(inputs, k_turned, masks):
    """k and q decayed from the start of the chunk [T, heads, K], k decayed to its end [K, heads, T]; the decays from
    the start and to the end [T, heads, K], and of the whole chunk, float32 [K, heads]; None where there are none.
    """
    k, q, gates = inputs["k"], inputs["q"], inputs["channel_gates"]
    if gates is None:
        return k, q, k_turned, None, None, None
    steps = k.shape[0]
    until, after = masks["until"][0:steps, 0, 0:steps], masks["after"][0:steps, 0, 0:steps]
    from_start = chunk_decays.factors(until, gates, nl.float32)
    to_end = chunk_decays.factors(after, gates, nl.float32)
    k_read = heads.combined(k, nl.multiply, from_start, nl.float32)
    q_read = heads.combined(q, nl.multiply, from_start, nl.float32)
    k_written = heads.combined(k_turned, nl.multiply, chunk_decays.turned_factors(after, gates, nl.float32), nl.float32)
    return k_read, q_read, k_written, from_start, to_end, chunk_decays.total(gates, masks["until"])


def _write_grad_decay(exponents, place, grad_log_decay):
    """The gradient of g per channel, or of g per head the sum over its channels."""
    b, start, stop, first, last = place
    if len(grad_log_decay.shape) == 4:
        grad = heads.activated(exponents, nl.copy, nl.float32)
    else:
        grad = heads.summed(exponents)
    nisa.dma_copy(dst=grad_log_decay[b, start:stop, first:last], src=grad)
