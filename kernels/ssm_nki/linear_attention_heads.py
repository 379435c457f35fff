"""Gradients of linear attention with a decay per head, in one chunk; see ssm_nki.linear_attention_backward."""

from ssm_nki import chunk_decays, heads
from ssm_nki import linear_attention_chunk as chunk
from ssm_nki.chunk_decays import CHUNK
from ssm_nki.sdk import nisa, nl


def gradients(block, part, masks):
    """The gradients of v [T, heads, V], log_decay [T, heads] and S [K, heads, V] of a part.

    Those of q and k go to the block: what comes through S and S', and D_ts dM_ts to turned_pairs, added up over heads
    that share q and k.
    """
    v, grad_out, dtype = part["v"], part["grad_out"], part["v"].dtype
    steps, count, values = v.shape
    place, last, channels = part["place"], part["place"] + count, part["state"].shape[0]
    identity = masks["identity"][0:CHUNK, 0, 0:CHUNK]
    decays = chunk_decays.pair_decays(block["gates"], place, count, masks, True, dtype)  # [t, heads, s]
    grad_pairs = nl.ndarray((steps, count, steps), dtype=nl.float32, buffer=nl.psum)
    chunk.add_over_values(grad_pairs, part["grad_out_turned"], part["v_turned"], count)
    grad_pairs = heads.combined(grad_pairs, nl.multiply, decays, dtype)
    for h in range(count):
        nisa.nc_matmul(
            dst=block["turned_pairs"][0:steps, min(h, block["k"].shape[1] - 1), 0:steps],
            stationary=grad_pairs[0:steps, h, 0:steps],
            moving=identity[0:steps, 0:steps],
            is_moving_onezero=True,
        )
    reading = heads.combined(grad_out, nl.multiply, heads.widened(block["from_start"], place, count, values), dtype)
    chunk.add_over_values(block["grads"]["q"], chunk.turned_values(reading, identity), part["state_turned"], count)
    written = heads.scaled(v, block["to_end"][0:steps, place:last], dtype)
    chunk.add_over_values(block["grads"]["k"], chunk.turned_values(written, identity), part["leaving_turned"], count)
    at_end = heads.products(block["k_turned"], part["short_leaving"])  # [s, heads, V]
    at_end = heads.combined(at_end, nl.multiply, heads.widened(block["to_end"], place, count, values), dtype)
    mix = heads.combined(decays, nl.multiply, block["scores"][0:steps, 0:count, 0:steps], dtype)  # M
    grad_v = heads.products(mix, grad_out)
    heads.add_products(grad_v, masks["identity"][0:steps, 0:1, 0:steps], at_end)
    decayed = heads.scaled(part["leaving"], block["total"][0:channels, place:last], nl.float32)
    return {
        "v": heads.activated(grad_v, nl.copy, dtype),
        "state": heads.combined(decayed, nl.add, heads.products(block["q"], reading), nl.float32),
        "log_decay": _gate_gradients(block, part, reading, at_end, grad_pairs, masks),
    }


def _gate_gradients(block, part, reading, at_end, grad_pairs, masks):
    """dg [T, heads] in SBUF, from D_t0 do_t, (D_Cs k_s)^T dS' and D_ts dM_ts."""
    place, v, dtype = part["place"], part["v"], part["v"].dtype
    steps, count, values = v.shape
    channels = part["state"].shape[0]
    since, before = masks["since"][0:steps, 0, 0:steps], masks["before"][0:steps, 0, 0:steps]
    by_value = nl.ndarray((steps, count, values), dtype=nl.float32, buffer=nl.psum)
    read = heads.products(block["q_turned"], part["state"])
    nisa.nc_matmul(dst=by_value, stationary=since, moving=heads.combined(read, nl.multiply, reading, dtype))  # a
    nisa.nc_matmul(dst=by_value, stationary=before, moving=heads.combined(at_end, nl.multiply, v, dtype))  # b
    sums = nl.ndarray((steps, count, 1), dtype=nl.float32, buffer=nl.psum)
    pairs = heads.combined(grad_pairs, nl.multiply, block["scores"][0:steps, 0:count, 0:steps], dtype)  # P
    chunk_decays.add_pair_sums(sums, (pairs,), masks)
    of_state = heads.summed(heads.combined(part["state"], nl.multiply, part["short_leaving"], dtype))
    of_state = heads.combined(of_state, nl.multiply, block["total"][0:channels, place : place + count], nl.float32)
    nisa.nc_matmul(dst=sums, stationary=masks["ones"][0:channels, 0, 0:steps], moving=of_state)  # c
    return heads.combined(heads.summed(by_value), nl.add, sums, nl.float32)
