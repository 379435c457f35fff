"""Linear attention with decay, chunk by chunk: RetNet, Mamba-2 (SSD), GLA. The backward kernel has its own file.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * q_t^T S_t

    q, k  query and key, K channels        S  state [K, V], reads a value from a key
    v     value, V channels                g  log decay <= 0: none, per head, or per key channel

Katharopoulos et al. 2020 (arXiv:2006.16236); RetNet (arXiv:2307.08621); Mamba-2 (arXiv:2405.21060); GLA
(arXiv:2312.06635). In a chunk of up to 128 steps that starts from S, with the decays D_ts from s to t (D_t0 from the
chunk's start through t, D_Cs from s to its end),

    o_t = scale * ((D_t0 q_t)^T S + sum_{s<=t} M_ts v_s)        M_ts = q_t^T D_ts k_s
    S'  = D_C0 S + sum_s (D_Cs k_s) v_s^T

A decay per head is a number, so that heads which share q and k share their products: D_t0 scales what is read, D_Cs the
values, D_ts the scores q k^T. A decay per key channel scales q and k (ssm_nki.chunk_decays). Steps of a chunk lie on
partitions; a few heads, a part, lie side by side.

    step                                     engine              operands
    load q, k, v, g                          DMA                 HBM -> SBUF [T, heads, channels]
    k^T, q^T, scores k q^T                   TensorE, ScalarE    PSUM -> SBUF; once for heads that share them
    sums of g between steps                  GpSimd, TensorE     [r, heads, t] -> PSUM [s, heads, t]
    D_ts, times scores: M^T                  ScalarE, VectorE    exp on the way to SBUF [s, heads, t]
    o                                        TensorE, ScalarE    sums in PSUM [T, heads, V], to SBUF once
    what is read, times D_t0                 VectorE             PSUM -> SBUF, and added to o by TensorE
    S                                        TensorE, VectorE    float32 in SBUF [K, heads, V]

Limits: K up to 128, V up to 512. Any T: the last chunk is shorter. The number of instructions grows with B * H * T.
"""

from ssm_nki import chunk_decays, heads, tiles
from ssm_nki import linear_attention_chunk as chunk
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.linear_attention_backward import linear_attention_backward
from ssm_nki.sdk import nisa, nki, nl

__all__ = ["linear_attention_backward", "linear_attention_forward"]


@nki.jit
def linear_attention_forward(q, k, v, log_decay=None, state=None, scale=1.0, keep=False):
    """(o, final state), and with `keep` the states that enter the chunks, for the backward kernel.

    Args:
        q, k: [B, T, G, K], bfloat16 or float32; G divides H, and H / G neighbouring heads share a key head.
        v: [B, T, H, V] of the same type.
        log_decay: g, float32, finite, [B, T, H] or [B, T, H, K]; None for no decay.
        state: S before the first step, float32 [B, H, K, V]; None for zeros.
        scale: of o, a number.
        keep: return [B, chunks, K, H, V] of the type of v too.

    Returns:
        o: [B, T, H, V] of the type of v; the final state: float32 [B, H, K, V].
    """
    batch, steps, count, values = v.shape
    channels = k.shape[3]
    kind = chunk_decays.decay_kind(log_decay)
    masks = chunk.constants(v.dtype, kind, False)
    out = nl.ndarray(v.shape, dtype=v.dtype, buffer=nl.shared_hbm)
    final = nl.ndarray((batch, count, channels, values), dtype=nl.float32, buffer=nl.shared_hbm)
    entering = None
    if keep:
        chunks = (steps + CHUNK - 1) // CHUNK
        entering = nl.ndarray((batch, chunks, channels, count, values), dtype=v.dtype, buffer=nl.shared_hbm)
    for b in range(batch):
        for parts in chunk.blocks(k.shape[2], count, values, kind):
            states = []
            for part in parts:
                first, last = part
                if state is None:
                    states.append(tiles.filled((channels, last - first, values), 0.0, nl.float32))
                else:
                    states.append(heads.load_state(state[b], first, last))
            for start in range(0, steps, CHUNK):
                stop = min(start + CHUNK, steps)
                block = _block(q, k, log_decay, (b, start, stop), parts, count, kind, masks)
                for i in range(len(parts)):
                    first, last = parts[i]
                    place = first - parts[0][0]
                    v_part = heads.load(v[b, start:stop], first, last - first, 1)
                    short = heads.as_type(states[i], v.dtype)
                    if entering is not None:
                        nisa.dma_copy(dst=entering[b, start // CHUNK, 0:channels, first:last], src=short)
                    result = _read(block, place, v_part, short, masks, scale)
                    nisa.dma_copy(dst=out[b, start:stop, first:last], src=result)
                    states[i] = _written(block, place, v_part, states[i])
            for i in range(len(parts)):
                heads.store_state(final[b], parts[i][0], parts[i][1], states[i])
    if keep:
        return out, final, entering
    return out, final


def _block(q, k, log_decay, span, parts, count, kind, masks):
    """What the heads of a block have in common in one chunk, by name.

    reader: q turned [K, keys, T], and writer: k [T, keys, K], with their decays if those are per channel.
    mix: M^T [s, keys, t]; of decays per head, instead: scores, k q^T [s, heads of a part, t], gates, g [T, heads], and
    the decays from_start, in SBUF, and to_end, in PSUM [T, heads].
    total: the decay of the chunk [K, heads].
    """
    b, start, stop = span
    first, last = parts[0][0], parts[len(parts) - 1][1]
    k = chunk.load_keys(k[b, start:stop], first, last, count, kind)
    q = chunk.load_keys(q[b, start:stop], first, last, count, kind)
    steps, keys, channels = k.shape
    identity = masks["identity"][0:CHUNK, 0, 0:CHUNK]
    until, after = masks["until"][0:steps, 0, 0:steps], masks["after"][0:steps, 0, 0:steps]
    q_turned = heads.transposed(q, identity, q.dtype)
    k_turned = heads.transposed(k, identity, q.dtype)
    scores = heads.products(k_turned, q_turned)
    block = {"kind": kind, "reader": q_turned, "writer": k}
    if kind == "none":
        present = heads.repeated(masks["present"], 0, steps, keys, steps)
        block["mix"] = heads.combined(scores, nl.multiply, present, k.dtype)
    elif kind == "head":
        gates = tiles.load(log_decay[b, start:stop, first:last])
        block["gates"] = gates
        block["from_start"] = chunk_decays.head_factors(until, gates, nl.sbuf)
        block["to_end"] = chunk_decays.head_factors(after, gates, nl.psum)
        block["total"] = chunk_decays.head_factors(masks["ones"][0:steps, 0, 0:channels], gates, nl.sbuf)
        block["scores"] = scores
        if keys < last - first:  # as often as a part has heads, side by side
            scores = heads.repeated(scores, 0, steps, parts[0][1] - first, steps)
            block["scores"] = heads.activated(scores, nl.copy, k.dtype)
    else:
        gates = heads.load(log_decay[b, start:stop], first, last - first, 1)
        block["mix"] = _channel_mix(q, k, gates, scores, masks)
        from_start = chunk_decays.turned_factors(until, gates, k.dtype)
        block["reader"] = heads.combined(q_turned, nl.multiply, from_start, k.dtype)
        block["writer"] = heads.combined(k, nl.multiply, chunk_decays.factors(after, gates, k.dtype), k.dtype)
        block["total"] = chunk_decays.total(gates, masks["until"])
    return block


def _channel_mix(q, k, gates, scores, masks):
    """M^T with a decay for each channel, a new tile [s, heads, t] in SBUF; scores: k q^T in PSUM."""
    steps, count, channels = k.shape
    mix = heads.combined(scores, nl.multiply, heads.repeated(masks["unit"], 0, steps, count, steps), nl.float32)
    for level in range(chunk_decays.levels(steps)):
        decays = chunk_decays.turned_factors(masks["weights"][0:steps, level, 0:steps], gates, k.dtype)
        both = nl.ndarray((channels, count, steps), dtype=nl.float32, buffer=nl.psum)  # q later, k earlier
        for h in range(count):
            _add_turned(both, h, q, masks["later"][0:steps, level, 0:steps])
            _add_turned(both, h, k, masks["earlier"][0:steps, level, 0:steps])
        both = heads.combined(both, nl.multiply, decays, k.dtype)
        pairs = heads.repeated(masks["pairs"], level, steps, count, steps)
        nisa.tensor_copy_predicated(dst=mix, src=heads.products(both, both), predicate=pairs)
    return heads.as_type(mix, k.dtype)


def _add_turned(sums, h, x, steps_kept):
    """Add head h of x[T, heads, K] to sums[K, heads, T] in PSUM, at the steps where the diagonal `steps_kept` is 1."""
    steps, count, channels = x.shape
    nisa.nc_matmul(
        dst=sums[0:channels, h, 0:steps],
        stationary=x[0:steps, h, 0:channels],
        moving=steps_kept,
        is_moving_onezero=True,
    )


def _read(block, place, v, state, masks, scale):
    """o of the heads from `place` on in the block, [T, heads, V] in SBUF; state: S in the type of v."""
    steps, count, values = v.shape
    if block["kind"] != "head":
        sums = heads.products(block["mix"], v)
        heads.add_products(sums, block["reader"], state)
        return heads.activated(sums, nl.copy, v.dtype, scale)
    decays = chunk_decays.pair_decays(block["gates"], place, count, masks, False, v.dtype)  # [s, heads, t]
    mix = heads.combined(decays, nl.multiply, block["scores"][0:steps, 0:count, 0:steps], v.dtype)
    read = heads.products(block["reader"], state)
    read = heads.combined(read, nl.multiply, heads.widened(block["from_start"], place, count, values), v.dtype)
    sums = heads.products(mix, v)
    heads.add_products(sums, masks["identity"][0:steps, 0:1, 0:steps], read)
    return heads.activated(sums, nl.copy, v.dtype, scale)


def _written(block, place, v, state):
    """The state after the chunk, float32 [K, heads, V] in SBUF, of the heads from `place` on in the block."""
    count, values, channels = v.shape[1], v.shape[2], state.shape[0]
    if block["kind"] != "none":
        state = heads.scaled(state, block["total"][0:channels, place : place + count], nl.float32)
    if block["kind"] == "head":
        v = heads.combined(v, nl.multiply, heads.widened(block["to_end"], place, count, values), v.dtype)
    return heads.combined(state, nl.add, heads.products(block["writer"], v), nl.float32)
