"""Gradients of linear attention, chunk by chunk, from the last to the first; see ssm_nki.linear_attention.

With dX the gradient of X, S the state that enters the chunk, dS' that of the state which leaves it, and do times scale,

    dM = do v^T for s <= t                  dv_s = sum_t M_ts do_t + (D_Cs k_s)^T dS'
    d(D_t0 q_t) = S do_t                    d(D_Cs k_s) = dS' v_s
    dS = D_C0 dS' + sum_t (D_t0 q_t) do_t^T

S is what the forward kernel kept; the rest of a chunk is computed again. The gradient of an exponent is that of its
decay times the decay, and g_r gets those of all exponents that contain it, by products with 0/1 matrices. No difference
of sums: the gradient of a strong decay is as small as it should be.

    decay per head     D_t0: do_t^T (D_t0 q_t)^T S    D_Cs: v_s^T (D_Cs k_s)^T dS'    D_C0: <D_C0 dS', S>
    (.._heads.py)      D_ts: dM_ts M_ts
    per key channel    as above in each channel. Between steps, level by level (ssm_nki.chunk_decays): a step is in the
    (.._channels.py)   later half of its block, a reader, x_t = D q_t, or in the earlier, a writer, x_t = D k_t. With E
                       the pairs of dM + dM^T of that level, y = E x is the gradient of x, of readers and of writers in
                       one product; D y is what q_t or k_t gets, and x y, in each channel, what the exponent gets.

Layout and limits are those of the forward kernel, with t on partitions where it has s. Products over values have those
on partitions, in slices of up to 128.

    step                                     engine              operands
    load do, q, k, v, g, S                   DMA                 HBM -> SBUF [T, heads, channels]
    q^T, k^T; do^T, v^T, S^T, dS'^T          TensorE, ScalarE    -> SBUF; with channels, with values on partitions
    decays                                   as in the forward kernel
    dM, times D_ts                           TensorE, VectorE    PSUM -> SBUF [t, heads, s]
    dq, dk                                   TensorE, ScalarE    sums over heads that share them in PSUM, to SBUF once
    dv                                       TensorE, ScalarE    sums in PSUM [T, heads, V], to SBUF once
    dS                                       TensorE, VectorE    float32 in SBUF [K, heads, V]
    gradients of exponents, of g             VectorE, TensorE    products with 0/1 matrices, sums in PSUM
"""

from ssm_nki import chunk_decays, heads, linear_attention_channels, linear_attention_heads, tiles
from ssm_nki import linear_attention_chunk as chunk
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.sdk import nisa, nki, nl


@nki.jit
def linear_attention_backward(grad_out, grad_final, q, k, v, entering, log_decay=None, scale=1.0):
    """The gradients of q, k, v, log_decay (left out where that is None) and of the initial state.

    Args:
        grad_out: [B, T, H, V] of the type of v.
        grad_final: gradient of the final state, float32 [B, H, K, V].
        q, k, v, log_decay, scale: as for the forward kernel.
        entering: what the forward kernel returned with `keep`.

    Returns:
        Gradients of q and k, [B, T, J, K] of their type, J a multiple of G: those of J / G neighbours are to be added;
        of v, [B, T, H, V] of its type; of log_decay, in its shape, and of the state [B, H, K, V], float32.
    """
    batch, steps, count, values = v.shape
    kind = chunk_decays.decay_kind(log_decay)
    masks = _constants(k.dtype, kind)
    blocks = chunk.blocks(k.shape[2], count, values, kind)
    inputs = {"grad_out": grad_out, "q": q, "k": k, "v": v, "log_decay": log_decay, "entering": entering}
    pieces = len(blocks) if chunk.shares_keys(k.shape[2], count, kind) else count
    grads = {
        "q": nl.ndarray((batch, steps, pieces, k.shape[3]), dtype=k.dtype, buffer=nl.shared_hbm),
        "k": nl.ndarray((batch, steps, pieces, k.shape[3]), dtype=k.dtype, buffer=nl.shared_hbm),
        "v": nl.ndarray(v.shape, dtype=v.dtype, buffer=nl.shared_hbm),
        "state": nl.ndarray((batch, count, k.shape[3], values), dtype=nl.float32, buffer=nl.shared_hbm),
    }
    if kind != "none":
        grads["log_decay"] = nl.ndarray(log_decay.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    chunks = entering.shape[1]
    for b in range(batch):
        for piece in range(len(blocks)):
            parts = blocks[piece]
            leaving = []
            for part in parts:
                leaving.append(heads.load_state(grad_final[b], part[0], part[1]))
            for i in range(chunks):
                start = (chunks - 1 - i) * CHUNK
                span = (b, start, min(start + CHUNK, steps))
                place = piece if pieces == len(blocks) else parts[0][0]
                leaving = _chunk(inputs, span, parts, place, leaving, kind, masks, scale, grads)
            for i in range(len(parts)):
                heads.store_state(grads["state"][b], parts[i][0], parts[i][1], leaving[i])
    if kind == "none":
        return grads["q"], grads["k"], grads["v"], grads["state"]
    return grads["q"], grads["k"], grads["v"], grads["log_decay"], grads["state"]


def _constants(dtype, kind):
    """Masks in SBUF by name: see ssm_nki.linear_attention_chunk.constants; since and before as their comments say."""
    masks = chunk.constants(dtype, kind, True)
    masks["since"] = chunk_decays.square(nl.less_equal, dtype)  # row t, column r: r <= t
    masks["before"] = chunk_decays.square(nl.greater, dtype)  # row s, column r: s < r
    if kind == "channel":
        unit = masks["unit"][0:CHUNK, 0, 0:CHUNK]
        masks["turned_weights"] = heads.transposed(masks["weights"], unit, dtype)
        masks["writes"] = chunk_decays.square(nl.greater, nl.uint8)
        masks["both_ways"] = heads.side_by_side(
            heads.combined(chunk_decays.level_masks(True, dtype), nl.add, chunk_decays.level_masks(False, dtype), dtype)
        )
    return masks


def _chunk(inputs, span, parts, place, leaving, kind, masks, scale, grads):
    """Write the gradients of the heads of a block in one chunk, those of q and k to number `place` of their pieces.

    leaving: dS' of each part, float32 [K, heads, V] in SBUF; returns dS of each part.
    """
    b, start, stop = span
    block = _block(inputs, span, parts, masks, kind)
    keys = block["k"].shape[1]
    entering = []
    for i in range(len(parts)):
        part = _part(inputs, span, parts[i], parts[0][0], leaving[i], masks, scale)
        if kind == "none":
            result = _plain_gradients(block, part)
        elif kind == "head":
            result = linear_attention_heads.gradients(block, part, masks)
        else:
            result = linear_attention_channels.gradients(block, part, masks)
        entering.append(result["state"])
        first, last = parts[i]
        nisa.dma_copy(dst=grads["v"][b, start:stop, first:last], src=result["v"])
        if kind != "none":
            nisa.dma_copy(dst=grads["log_decay"][b, start:stop, first:last], src=result["log_decay"])
    if kind != "channel":
        _finish(block, masks)
    for name in ("q", "k"):
        result = heads.activated(block["grads"][name], nl.copy, block["k"].dtype)
        nisa.dma_copy(dst=grads[name][b, start:stop, place : place + keys], src=result)
    return entering


def _block(inputs, span, parts, masks, kind):
    """What the heads of a block have in common in one chunk, by name; grads: sums in PSUM of those of q and k.

    scores: q k^T [t, keys, s], with decays per head [t, heads of a part, s]; mix, without decay: M [t, keys, s].
    gates: g [T, heads, K], or [T, heads] and then the decays from_start, in PSUM, to_end [T, heads], total [K, heads].
    turned_pairs, without decays per channel: sums in PSUM of D_ts dM_ts, or dM_ts for all s and t, [s, keys, t].
    """
    b, start, stop = span
    first, last = parts[0][0], parts[len(parts) - 1][1]
    count = inputs["v"].shape[2]
    q = chunk.load_keys(inputs["q"][b, start:stop], first, last, count, kind)
    k = chunk.load_keys(inputs["k"][b, start:stop], first, last, count, kind)
    steps, keys, channels = k.shape
    identity = masks["identity"][0:CHUNK, 0, 0:CHUNK]
    q_turned, k_turned = heads.transposed(q, identity, q.dtype), heads.transposed(k, identity, q.dtype)
    scores = heads.products(q_turned, k_turned)  # in PSUM [t, keys, s]
    block = {
        "kind": kind,
        "q": q,
        "k": k,
        "q_turned": q_turned,
        "k_turned": k_turned,
        "scores": scores,
        "grads": {
            "q": nl.ndarray((steps, keys, channels), dtype=nl.float32, buffer=nl.psum),
            "k": nl.ndarray((steps, keys, channels), dtype=nl.float32, buffer=nl.psum),
        },
    }
    if kind == "none":
        present = heads.repeated(masks["present"], 0, steps, keys, steps)
        block["mix"] = heads.combined(scores, nl.multiply, present, k.dtype)
    if kind == "head":
        gates = tiles.load(inputs["log_decay"][b, start:stop, first:last])
        until, after = masks["until"][0:steps, 0, 0:steps], masks["after"][0:steps, 0, 0:steps]
        block["gates"] = gates
        block["from_start"] = chunk_decays.head_factors(until, gates, nl.psum)
        block["to_end"] = chunk_decays.head_factors(after, gates, nl.sbuf)
        block["total"] = chunk_decays.head_factors(masks["ones"][0:steps, 0, 0:channels], gates, nl.sbuf)
        if keys < last - first:
            scores = heads.repeated(scores, 0, steps, parts[0][1] - first, steps)
        block["scores"] = heads.activated(scores, nl.copy, k.dtype)
    if kind == "channel":
        block["gates"] = heads.load(inputs["log_decay"][b, start:stop], first, last - first, 1)
    else:
        block["turned_pairs"] = nl.ndarray((steps, keys, steps), dtype=nl.float32, buffer=nl.psum)
    return block


def _part(inputs, span, part, origin, leaving, masks, scale):
    """What the heads of a part have of their own in one chunk, by name; `turned` values come in slices."""
    b, start, stop = span
    first, last = part
    identity = masks["identity"][0:CHUNK, 0, 0:CHUNK]
    grad_out = heads.load(inputs["grad_out"][b, start:stop], first, last - first, 1)
    if scale != 1.0:
        grad_out = heads.activated(grad_out, nl.copy, grad_out.dtype, scale)
    v = heads.load(inputs["v"][b, start:stop], first, last - first, 1)
    state = tiles.load(inputs["entering"][b, start // CHUNK, 0 : leaving.shape[0], first:last])
    short_leaving = heads.as_type(leaving, v.dtype)
    return {
        "place": first - origin,
        "v": v,  # [T, heads, V]
        "grad_out": grad_out,
        "state": state,  # S [K, heads, V]
        "leaving": leaving,  # dS'
        "short_leaving": short_leaving,
        "v_turned": chunk.turned_values(v, identity),
        "grad_out_turned": chunk.turned_values(grad_out, identity),
        "state_turned": chunk.turned_values(state, identity),
        "leaving_turned": chunk.turned_values(short_leaving, identity),
    }


def _plain_gradients(block, part):
    """Without decay: the gradients of v [T, heads, V] and S [K, heads, V]; those of q and k go to the block."""
    v, grad_out = part["v"], part["grad_out"]
    count = v.shape[1]
    chunk.add_over_values(block["turned_pairs"], part["v_turned"], part["grad_out_turned"], count)
    chunk.add_over_values(block["grads"]["q"], part["grad_out_turned"], part["state_turned"], count)
    chunk.add_over_values(block["grads"]["k"], part["v_turned"], part["leaving_turned"], count)
    grad_v = heads.products(block["mix"], grad_out)
    heads.add_products(grad_v, block["k_turned"], part["short_leaving"])
    state = heads.combined(part["leaving"], nl.add, heads.products(block["q"], grad_out), nl.float32)
    return {"v": heads.activated(grad_v, nl.copy, v.dtype), "state": state}


def _finish(block, masks):
    """Add what q and k get through M to their gradients."""
    steps, keys, dtype = block["k"].shape[0], block["k"].shape[1], block["k"].dtype
    if block["kind"] == "none":
        until = heads.repeated(masks["until"], 0, steps, keys, steps)
        turned = heads.combined(block["turned_pairs"], nl.multiply, until, dtype)
    else:
        turned = heads.activated(block["turned_pairs"], nl.copy, dtype)
    heads.add_products(block["grads"]["q"], turned, block["k"])
    pairs = heads.transposed(turned, masks["identity"][0:CHUNK, 0, 0:CHUNK], dtype)
    heads.add_products(block["grads"]["k"], pairs, block["q"])
