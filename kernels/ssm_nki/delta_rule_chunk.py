"""What the forward and the backward kernel of the delta rule compute alike in a chunk: how its steps act on each other.

    L_ts = k_t^T D_ts k_s  for s < t        M_ts = q_t^T D_ts k_s  for s <= t

D_ts is the decay from step s to step t (ssm_nki.chunk_decays). The forward kernel needs both with s on partitions, the
backward kernel with t, since TensorE reads its stationary operand transposed.
"""

from ssm_nki import chunk_decays, heads
from ssm_nki.sdk import nisa, nl


def load_gates(log_decay, first, count, channels):
    """(g for each head [T, count] or None, g for each channel [T, count, channels]), new float32 tiles in SBUF.

    log_decay: [T, H] or [T, H, K] in HBM; one decay per head is the same for all its channels.
    """
    steps = log_decay.shape[0]
    if len(log_decay.shape) == 3:
        return None, heads.load(log_decay, first, count, 1)
    gates = nl.ndarray((steps, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=gates, src=log_decay[0:steps, first : first + count])
    every_channel = nl.ndarray((steps, count, channels), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=every_channel, src=gates.ap(pattern=[[count, steps], [1, count], [0, channels]]))
    return gates, every_channel


def interactions(k_turned, q_turned, gates, channel_gates, masks, row_is_later, mix_dtype):
    """By name, tiles [T, H, T]: system, which is L, in SBUF as float32, and mix, which is M, as `mix_dtype`.

    Both have zeros in their other half. Where no channel has a decay of its own, also: strict and present, the decays
    D in L and in M; k_scores and q_scores, the products of k and q with k, in PSUM.

    k_turned, q_turned: [K, H, T]; gates, channel_gates: see `load_gates`.
    """
    if "pairs" in masks:
        return _channel_interactions(k_turned, q_turned, channel_gates, masks, row_is_later, mix_dtype)
    steps, count = k_turned.shape[2], k_turned.shape[1]
    strict = heads.repeated(masks["strict"], 0, steps, count, steps)
    if gates is None:
        present = heads.repeated(masks["present"], 0, steps, count, steps)
    else:
        present = chunk_decays.pair_decays(gates, 0, count, masks, row_is_later, nl.float32)
        strict = heads.combined(present, nl.multiply, strict, nl.float32)
    k_scores = heads.products(k_turned, k_turned)
    q_scores = heads.products(q_turned, k_turned) if row_is_later else heads.products(k_turned, q_turned)
    return {
        "system": heads.combined(k_scores, nl.multiply, strict, nl.float32),
        "mix": heads.combined(q_scores, nl.multiply, present, mix_dtype),
        "strict": strict,
        "present": present,
        "k_scores": k_scores,
        "q_scores": q_scores,
    }


def _channel_interactions(k_turned, q_turned, gates, masks, row_is_later, mix_dtype):
    """L and M with a decay for each channel, level by level."""
    steps, count = k_turned.shape[2], k_turned.shape[1]
    system = nl.ndarray((steps, count, steps), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=system, value=0.0)
    unit = heads.repeated(masks["unit"], 0, steps, count, steps)
    q_scores = heads.products(q_turned, k_turned) if row_is_later else heads.products(k_turned, q_turned)
    mix = heads.combined(q_scores, nl.multiply, unit, nl.float32)
    for level in range(chunk_decays.levels(steps)):
        decays = chunk_decays.turned_factors(masks["weights"][0:steps, level, 0:steps], gates, k_turned.dtype)
        k_level = heads.combined(k_turned, nl.multiply, decays, k_turned.dtype)
        q_level = heads.combined(q_turned, nl.multiply, decays, k_turned.dtype)
        k_scores = heads.products(k_level, k_level)
        q_scores = heads.products(q_level, k_level) if row_is_later else heads.products(k_level, q_level)
        pairs = heads.repeated(masks["pairs"], level, steps, count, steps)
        nisa.tensor_copy_predicated(dst=system, src=k_scores, predicate=pairs)
        nisa.tensor_copy_predicated(dst=mix, src=q_scores, predicate=pairs)
    return {"system": system, "mix": heads.as_type(mix, mix_dtype)}
