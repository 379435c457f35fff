"""Causal softmax attention, full or in a sliding window, with a cache.

    o_t = sum over s in V(t) of softmax_s(scale * q_t^T k_s) v_s

V(t) holds the steps s <= t that are real tokens, of t's own document, and no further back than the window.
Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1; sliding window: Beltagy et al. 2020 (arXiv:2004.05150).

Positions count real tokens: masked steps have none, so that a padded row equals the row without its padding. The cache
is (keys [B, S, Hk, K], values [B, S, Hk, V], positions int64 [B, S]), position -1 marking a free slot. With a window
it holds the last S = window tokens; without one it has room for the tokens it was made for, and grows when needed.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn.ops import backends
from ssm_trn.ops.packing import at_last_reset

Cache = tuple[Tensor, Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    cache: Cache | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Cache]:
    """Softmax attention of T new steps over themselves and a cache of earlier ones.

    Args:
        q: queries [B, T, H, K].
        k, v: keys [B, T, Hk, K] and values [B, T, Hk, V]; H must be a multiple of Hk (grouped heads).
        window: each step sees itself and the window - 1 real tokens before it; None: all of them.
        mask: bool [B, T], True at real tokens. Masked steps, whatever they hold, are seen by nobody; their own output
            is 0.
        reset: bool [B, T], True where a document begins: nothing before it is seen from there on.
        cache: what an earlier call or `empty_cache` returned. Free slots are written in place where no gradient needs
            them: of two continuations of one cache, only the later one stays valid.
        scale: of q^T k; 1 / sqrt(K) when None.

    Returns:
        The output [B, T, H, V] in the dtype of v, and the cache that includes the new steps.

    Raises:
        ValueError: where shapes do not fit.
    """
    _check(q, k, v, window, mask, reset)
    if mask is not None:  # a weight of 0 does not silence a NaN
        q, k, v = (x.masked_fill(~mask[..., None, None], 0) for x in (q, k, v))
    if reset is not None and mask is not None:
        reset = reset & mask  # a masked step is as if deleted, its reset with it
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    form = backends.select("attention", {"reference": reference, "torch": fused}, q.device)
    new = (k, v, next_positions(cache, mask, q.shape[0], q.shape[1], q.device))
    if cache is None and mask is None and reset is None and (window is None or window >= q.shape[1]):
        return form(q, k, v, None, scale), new
    (keys, values, positions), cache = _store(cache, new, window, mask)
    visible = _visible(new[2], positions, window)
    if reset is not None:  # no look across the beginning of the document, and nothing before it is kept
        starts = at_last_reset(reset, new[2], 0)  # [B, T]
        visible &= positions[:, None, :] >= starts[:, :, None]
        cache = (cache[0], cache[1], cache[2].masked_fill(cache[2] < starts[:, -1:], -1))
    if (
        mask is not None
    ):  # a masked step sees nothing, which would divide 0 by 0: it sees all, and its output is dropped
        visible |= ~mask[:, :, None]
    out = form(q, keys, values, visible, scale)
    return (out if mask is None else out.masked_fill(~mask[..., None, None], 0)), cache


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """The definition, one step and one sequence at a time. visible: bool [B, T, S], or None for plain causality."""
    batch, length, heads, _ = q.shape
    if visible is None:
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().expand(batch, -1, -1)
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k.to(q.dtype), v.to(q.dtype)))
    rows = []
    for b in range(batch):
        for t in range(length):
            keys, values = k[b, visible[b, t]], v[b, visible[b, t]]  # [s, H, K], [s, H, V]
            weights = (scale * torch.einsum("hk,shk->sh", q[b, t], keys)).softmax(0)
            rows.append(torch.einsum("sh,shv->hv", weights, values))
    return torch.stack(rows).view(batch, length, heads, -1)


def fused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """The same through PyTorch's fused attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
    grouped = q.shape[1] != k.shape[1]
    if visible is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def empty_cache(batch: int, slots: int, k_shape: Sequence[int], v_shape: Sequence[int], device, dtype) -> Cache:
    """A cache of `slots` free slots for keys of shape [Hk, K] and values of shape [Hk, V]."""
    return (
        torch.zeros(batch, slots, *k_shape, device=device, dtype=dtype),
        torch.zeros(batch, slots, *v_shape, device=device, dtype=dtype),
        torch.full((batch, slots), -1, device=device, dtype=torch.int64),
    )


def next_positions(cache: Cache | None, mask: Tensor | None, batch: int, length: int, device) -> Tensor:
    """The positions [B, T] of T new steps: real tokens are numbered on from the cache, masked steps get -1."""
    if mask is None:
        steps = torch.arange(length, device=device).expand(batch, -1)
    else:
        steps = mask.cumsum(1, dtype=torch.int64) - 1
    if cache is not None:
        steps = steps + cache[2].amax(1, keepdim=True) + 1
    return steps if mask is None else steps.masked_fill(~mask, -1)


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which of S slots each of T steps sees, bool [B, T, S], from positions query [B, T] and key [B, S].

    Free slots (key -1) and masked steps (query -1) drop out.
    """
    query, key = query[:, :, None], key[:, None, :]
    visible = (key >= 0) & (key <= query)
    return visible if window is None else visible & (key > query - window)


def _store(cache: Cache | None, new: Cache, window: int | None, mask: Tensor | None) -> tuple[Cache, Cache]:
    """The slots that the new steps see, and the cache to keep."""
    if window is not None:
        seen = new if cache is None else _concatenate(cache, new)
        return seen, _last(seen, window, mask)
    if cache is None and mask is None:
        return new, new
    if cache is None:
        batch, length = new[2].shape
        cache = empty_cache(batch, length + 1, new[0].shape[2:], new[1].shape[2:], new[0].device, new[0].dtype)
    cache, used = _append(cache, new)
    return (cache[0][:, :used], cache[1][:, :used], cache[2][:, :used]), cache


def _concatenate(cache: Cache, new: Cache) -> Cache:
    keys, values, positions = (torch.cat([old.to(x.dtype), x], 1) for old, x in zip(cache, new, strict=True))
    return keys, values, positions


def _last(seen: Cache, window: int, mask: Tensor | None) -> Cache:
    """The last `window` real tokens, oldest first."""
    keys, values, positions = seen
    if mask is None:  # a view would keep the whole history alive
        return keys[:, -window:].clone(), values[:, -window:].clone(), positions[:, -window:].clone()
    order = positions.sort(dim=1, stable=True).indices[:, -window:]  # free slots (-1) come first and fall out first
    rows = torch.arange(order.shape[0], device=order.device)[:, None]
    return keys[rows, order], values[rows, order], positions[rows, order]


def _append(cache: Cache, new: Cache) -> tuple[Cache, int]:
    """Writes each new token into the slot of its position; returns the cache and how many of its slots are in use.

    The last slot is a spare: masked steps are written there, with position -1, so that no shape depends on the mask.
    Where the host may look at the positions (CPU and GPU), a full cache grows and unused slots are left out of the
    attention; elsewhere a cache is made for the whole length in advance, as `init_state` does.
    """
    keys, values, positions = cache
    used = positions.shape[1]
    if positions.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        used = max(int(new[2].max()), int(positions.max()) if positions.numel() else 0, 0) + 1
        missing = used + 1 - positions.shape[1]
        if missing > 0:
            keys, values = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (keys, values))
            positions = F.pad(positions, (0, missing), value=-1)
    slots = torch.where(new[2] < 0, positions.shape[1] - 1, new[2])  # [B, T]
    positions = positions.scatter(1, slots, new[2])
    return (_write(keys, slots, new[0]), _write(values, slots, new[1]), positions), used


def _write(buffer: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """buffer [B, S, H, D] with x [B, T, H, D] in the slots [B, T]; in place where no gradient needs the old values."""
    index, x = slots[:, :, None, None].expand_as(x), x.to(buffer.dtype)
    if torch.is_grad_enabled() and (buffer.requires_grad or x.requires_grad):
        return buffer.scatter(1, index, x)
    return buffer.scatter_(1, index, x)


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None, mask: Tensor | None, reset: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError("attention takes q, k and v of shape [batch, time, heads, dim]")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: shapes of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads")
    if window is not None and window < 1:
        raise ValueError(f"attention: a window of {window} steps sees nothing; it must be at least 1")
    for name, x in (("mask", mask), ("reset", reset)):
        if x is not None and (x.shape != q.shape[:2] or x.dtype != torch.bool):
            raise ValueError(f"attention: {name} must be bool {list(q.shape[:2])}, got {x.dtype} {list(x.shape)}")
