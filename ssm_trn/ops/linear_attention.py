"""Linear attention with decay: the recurrence behind RetNet, Mamba-2, GLA, RWKV-6 and their relatives.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * q_t^T S_t

    q, k  query and key, K channels        S  state [K, V], reads a value from a key
    v     value, V channels                g  log decay <= 0: none, per head, or per key channel

Linear attention without decay (Katharopoulos et al. 2020, arXiv:2006.16236); RetNet with a constant decay per head (Sun
et al. 2023, arXiv:2307.08621); Mamba-2 with one per head that depends on the input (Dao and Gu 2024, arXiv:2405.21060);
GLA with one per key channel (Yang et al. 2023, arXiv:2312.06635). RWKV-6 (Peng et al. 2024, arXiv:2404.05892) reads the
state before it decays, and weighs the present token apart:

    o_t = scale * q_t^T (S_{t-1} + diag(bonus) k_t v_t^T)
"""

import torch
from torch import Tensor

from ssm_trn.ops import parallel
from ssm_trn.ops.backends import find_kernel, select
from ssm_trn.ops.chunks import ChannelDecays, HeadDecays, cut, decay_of, fold_reset
from ssm_trn.ops.contexts import cast, full_precision

# Of 16, 32, 64 and 128 the best on a CPU: larger ones do more work per step, smaller ones more steps.
CHUNK_SIZE = 64


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    reset: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs S_t = exp(g_t) S_{t-1} + k_t v_t^T and reads o_t = scale * q_t^T S_t, for any number of steps.

    Args:
        q, k: queries and keys [B, T, G, K]; G divides H, and a group of H / G neighbouring heads shares one.
        v: values [B, T, H, V].
        log_decay: g <= 0, per head [B, T, H] or per key channel [B, T, H, K], -inf included; None for no decay.
        bonus: weight of the present token per head and key channel [H, K], for
            o_t = scale * q_t^T (S_{t-1} + diag(bonus) k_t v_t^T) instead.
        reset: bool [B, T]; True zeroes the state before that step.
        state: S before the first step [B, H, K, V], finite, or None for zeros.
        scale: of the queries.
        chunk_size: a hint for the chunked form; the result does not depend on it.

    Returns:
        o [B, T, H, V] in the dtype of v, and the state after the last step [B, H, K, V]: float32, or float64 where v
        is. Both carry gradients, to every input; second derivatives are not available.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    _check(q, k, v, log_decay, bonus, reset, state, chunk_size)
    batch, length, heads, values = v.shape
    arguments = {"q": q, "k": k, "v": v, "log_decay": log_decay, "bonus": bonus, "reset": reset, "state": state}
    if length > 1 and (kernel := find_kernel("linear_attention", arguments)):
        return kernel(**arguments, scale=scale)
    dtype = torch.promote_types(v.dtype, torch.float32)
    if log_decay is None:
        log_decay = v.new_zeros(batch, length, heads, dtype=dtype)
    if state is None:
        state = v.new_zeros(batch, heads, q.shape[-1], values, dtype=dtype)
    forms = {"reference": reference, "torch": chunked, "parallel": parallel.linear_attention}
    form = select("linear_attention", forms, v.device)
    if length == 1:  # a decode step needs no chunk
        form = single
    with full_precision(v.device):
        return form(q, k, v, cast(log_decay, dtype), bonus, reset, cast(state, dtype), scale, chunk_size)


def _check(q, k, v, log_decay, bonus, reset, state, chunk_size) -> None:
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            "q and k must be [batch, time, key heads, K] and v [batch, time, heads, V], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    batch, length, heads, values = v.shape
    channels = q.shape[-1]
    if length == 0:
        raise ValueError("linear_attention needs at least one time step, got none")
    if heads % q.shape[2]:
        raise ValueError(f"{heads} value heads cannot be shared evenly by {q.shape[2]} key heads")
    for name, x, shapes in (
        ("log_decay", log_decay, [(batch, length, heads), (batch, length, heads, channels)]),
        ("bonus", bonus, [(heads, channels)]),
        ("reset", reset, [(batch, length)]),
        ("state", state, [(batch, heads, channels, values)]),
    ):
        if x is not None and x.shape not in shapes:
            raise ValueError(f"{name} must be {' or '.join(str(list(s)) for s in shapes)}, got {list(x.shape)}")
    if reset is not None and reset.dtype != torch.bool:
        raise ValueError(f"reset must be a bool tensor, got {reset.dtype}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor | None,
    reset: Tensor | None,
    state: Tensor,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as a plain loop, in the dtype of the state."""
    heads = v.shape[2]
    q, k = (x.to(state.dtype).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))  # [B, T, H, K]
    decay = log_decay.exp()
    if decay.dim() == 3:
        decay = decay[..., None]  # [B, T, H, 1 or K]
    outputs = []
    # unbind, not x[:, t]: the gradient of each x[:, t] is as large as x, and so the backward pass O(T^2).
    steps = (x.unbind(1) for x in (q, k, v.to(state.dtype), decay))
    for t, (q_t, k_t, v_t, decay_t) in enumerate(zip(*steps, strict=True)):
        out_t, state = _step(q_t, k_t, v_t, decay_t, bonus, None if reset is None else reset[:, t], state)
        outputs.append(out_t)
    return (scale * torch.stack(outputs, 1)).to(v.dtype), state


def _step(q, k, v, decay, bonus, reset, state: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the recurrence: q, k [..., H or 1, K], v [..., H, V], decay [..., H, 1 or K], reset bool [...]."""
    if reset is not None:
        state = state.masked_fill(reset[..., None, None, None], 0)
    before = state
    state = (decay[..., None] * state).addcmul_(k[..., None], v[..., None, :])
    seen = state if bonus is None else torch.addcmul(before, (bonus * k)[..., None], v[..., None, :])
    return (q[..., None, :] @ seen).squeeze(-2), state


def single(q, k, v, log_decay, bonus, reset, state, scale: float, chunk_size) -> tuple[Tensor, Tensor]:
    """`reference` for T = 1, without the loop around the step."""
    heads, groups = v.shape[2], q.shape[2]
    if 1 < groups < heads:  # a single group broadcasts as it is
        q, k = (x.repeat_interleave(heads // groups, 2) for x in (q, k))
    q, k, values = (cast(x, state.dtype) for x in (q, k, v))
    decay = log_decay.exp()
    decay = decay if decay.dim() == 4 else decay[..., None]  # [B, 1, H, 1 or K]
    out, state = _step(q, k, values, decay, bonus, reset, state.unsqueeze(1))
    out = out if scale == 1 else scale * out
    return cast(out, v.dtype), state.squeeze(1)  # [B, 1, H, V], [B, H, K, V]


# The chunked form (Mamba-2, section 6; GLA, section 4). With D_ts = exp(g_{s+1} + ... + g_t), a chunk after S has
#
#     o_t = (D_t0 q_t)^T S + sum_{s<=t} (q_t^T D_ts k_s) v_s        S' = D_C0 S + sum_s (D_Cs k_s) v_s^T
#
# all in matrix products; only S goes from chunk to chunk one by one. Decays per key channel scale q and k. Decays per
# head are plain numbers, so they scale o and v instead: the R heads of a group then share the products with q and k,
# single large ones, [C, K] times [K, R V].
#
# The backward pass keeps the inputs and the states that enter the chunks, and computes the rest of a chunk again. Both
# passes are custom operators, so that torch.compile takes them whole and does not unroll the loop over time.
#
# Shapes: N chunks of C steps, G groups of R heads. Values are [B, N, G, C, R, V], states [B, N, G, K, R, V].


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor | None,
    reset: Tensor | None,
    state: Tensor,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The same as `reference`, by matrix products over chunks of steps."""
    length, heads = v.shape[1:3]
    if log_decay.dim() == 4:  # q and k are scaled for each head apart
        q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    size = min(chunk_size or CHUNK_SIZE, length)
    inputs = k, v, fold_reset(log_decay, reset), state, 1 << (size - 1).bit_length(), scale
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_decay, state))
    if bonus is None:
        out, final, _ = _attend(q, *inputs, keep)
        return out, final
    # Step t reads the state after step t-1, so the queries move one step ahead; the first reads the initial state.
    ahead = torch.cat([q[:, 1:], torch.zeros_like(q[:, :1])], 1)
    after, final, _ = _attend(ahead, *inputs, keep)
    reader, present = (x.to(state.dtype).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    first = scale * (reader[:, 0, :, None] @ state).transpose(1, 2)  # [B, 1, H, V]
    before = torch.cat([first, after[:, :-1].to(state.dtype)], 1)
    if reset is not None:
        before = before.masked_fill(reset[..., None, None], 0)
    weight = scale * (reader * bonus * present).sum(-1, keepdim=True)  # [B, T, H, 1]
    return (before + weight * v).to(v.dtype), final


@torch.library.custom_op("ssm_trn::linear_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, size: int, scale: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state, and, if `keep`, the states that enter the chunks [B, N, G, K, R, V]."""
    length, groups = q.shape[1:3]
    entering = _entering(q, state, size, keep)
    q, k, v, log_decay = (cut(x, size) for x in (q, k, v, log_decay))  # [B, N, C, ...]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    final = _grouped_state(state, groups)
    for span in _spans(v):
        chunks = _Chunks(q[:, span], k[:, span], v[:, span], log_decay[:, span], scale, state.dtype, keep=False)
        final = chunks.forward(final, entering[:, span] if keep else None, _grouped(out[:, span], groups))
    return out.flatten(1, 2)[:, :length].contiguous(), _flat_state(final), entering


@_attend.register_fake
def _(q, k, v, log_decay, state, size, scale, keep):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, torch.empty_like(state, memory_format=torch.contiguous_format), _entering(q, state, size, keep)


@torch.library.custom_op("ssm_trn::linear_attention_backward", mutates_args=())
def _attend_backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    entering: Tensor,
    size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, log_decay and the state."""
    length, groups = q.shape[1:3]
    inputs = [cut(x, size) for x in (q, k, v, log_decay)]  # [B, N, C, ...]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    grad_out, grad_state = cut(grad_out, size), _grouped_state(grad_final, groups)
    for span in reversed(_spans(inputs[2])):
        q, k, v, log_decay = (x[:, span] for x in inputs)
        chunks = _Chunks(q, k, v, log_decay, scale, entering.dtype, keep=True)
        *parts, grad_state = chunks.backward(grad_out[:, span], grad_state, entering[:, span])
        for grad, part in zip(grads, parts, strict=True):
            target = grad[:, span] if grad.dim() == 5 else grad[:, span, ..., None]
            _grouped(target, part.shape[2]).copy_(part)
    grad_q, grad_k, grad_v, grad_log_decay = (x.flatten(1, 2)[:, :length].contiguous() for x in grads)
    return grad_q, grad_k, grad_v, grad_log_decay, _flat_state(grad_state)


@_attend_backward.register_fake
def _(grad_out, grad_final, q, k, v, log_decay, entering, size, scale):
    inputs = (q, k, v, log_decay, grad_final)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _keep_for_backward(ctx, inputs, output) -> None:
    q, k, v, log_decay, _, ctx.size, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, log_decay, output[2])
    ctx.set_materialize_grads(False)  # the states between chunks get no gradient, not even zeros


def _backward(ctx, grad_out: Tensor | None, grad_final: Tensor | None, _) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, entering = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(v)
    if grad_final is None:
        grad_final = entering.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    grads = _attend_backward(grad_out, grad_final, q, k, v, log_decay, entering, ctx.size, ctx.scale)
    return *grads, None, None, None


_attend.register_autograd(_backward, setup_context=_keep_for_backward)


def _spans(v: Tensor) -> list[slice]:
    """The chunks of v [B, N, C, H, V] that are computed at a time: on a CPU what fits in the cache, elsewhere all."""
    batch, count, size, heads, _ = v.shape
    step = max(1, 2**12 // (batch * heads * size)) if v.device.type == "cpu" else count
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _entering(q: Tensor, state: Tensor, size: int, keep: bool) -> Tensor:
    batch, length, groups, channels = q.shape
    count = -(-length // size) if keep else 0
    return state.new_empty(batch, count, groups, channels, state.shape[1] // groups, state.shape[-1])


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, N, C, H, V] -> [B, N, G, C, R, V], a view."""
    return x.unflatten(3, (groups, -1)).transpose(2, 3)


def _grouped_state(state: Tensor, groups: int) -> Tensor:
    """[B, H, K, V] -> [B, G, K, R, V], a view."""
    return state.unflatten(1, (groups, -1)).transpose(2, 3)


def _flat_state(state: Tensor) -> Tensor:
    """[B, G, K, R, V] -> [B, H, K, V], a copy."""
    return state.transpose(2, 3).flatten(1, 2).clone(memory_format=torch.contiguous_format)


class _Chunks:
    """Some chunks, and the passes through them: forward from the state that enters the first, backward from the
    gradient of the state that leaves the last.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, dtype: torch.dtype, keep: bool
    ):
        self.groups, self.scale, self.dtype = q.shape[3], scale, dtype
        q, k = (x.transpose(2, 3).to(dtype).contiguous() for x in (q, k))  # [B, N, G, C, K]
        self.v = self.values(v)
        weights = _HeadWeights if log_decay.dim() == 4 else _ChannelWeights
        self.weights = weights(q * scale, k, log_decay.transpose(2, 3).contiguous(), keep)

    def values(self, x: Tensor) -> Tensor:
        return _grouped(x, self.groups).to(self.dtype).contiguous()

    def forward(self, state: Tensor, entering: Tensor | None, out: Tensor) -> Tensor:
        """The state after the last chunk; writes o to `out`, and the states that enter the chunks to `entering`."""
        w, v = self.weights, self.v
        writes = _as_values(w.writer.mT @ _times(v, w.end).flatten(-2), v)
        if entering is None:
            entering = torch.empty_like(writes)
        entering[:, 0] = state
        for n in range(1, v.shape[1]):
            torch.addcmul(writes[:, n - 1], w.total[:, n - 1], entering[:, n - 1], out=entering[:, n])
        read, mixed = _as_values(w.reader @ entering.flatten(-2), v), (w.mix @ v.transpose(3, 4)).transpose(3, 4)
        if w.start is None:
            torch.add(read, mixed, out=out)
        else:
            torch.addcmul(mixed, read, w.start, out=out)
        return torch.addcmul(writes[:, -1], w.total[:, -1], entering[:, -1])

    def backward(self, grad_out: Tensor, grad_state: Tensor, entering: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, k, v, log_decay, each like values with their own groups and heads, and of the state."""
        w, v, grad_out = self.weights, self.v, self.values(grad_out)
        grad_read = _times(grad_out, w.start).flatten(-2)
        grad_entering = _as_values(w.reader.mT @ grad_read, v)
        grad_writes = torch.empty_like(grad_entering)
        grad_writes[:, -1] = grad_state
        for n in reversed(range(1, v.shape[1])):
            torch.addcmul(grad_entering[:, n], w.total[:, n], grad_writes[:, n], out=grad_writes[:, n - 1])
        grad_state = torch.addcmul(grad_entering[:, 0], w.total[:, 0], grad_writes[:, 0])
        entering_flat, grad_writes_flat = entering.flatten(-2), grad_writes.flatten(-2)
        grad_reader = grad_read @ entering_flat.mT
        grad_writer = _times(v, w.end).flatten(-2) @ grad_writes_flat.mT
        grad_v = _times(_as_values(w.writer @ grad_writes_flat, v), w.end)

        # The gradients of the logarithms of the decays; only decays per head scale values.
        grad_start = grad_end = None
        if w.start is not None:
            read = _as_values(grad_read, v) * _as_values(w.reader @ entering_flat, v)
            grad_start, grad_end = read.sum(-1, keepdim=True), (grad_v * v).sum(-1, keepdim=True)
        grad_total = grad_writes.mul_(entering).sum(-1, keepdim=True) * w.total  # [B, N, G, K, R, 1]

        grad_heads, heads = (x.transpose(3, 4).contiguous() for x in (grad_out, v))  # [B, N, G, R, C, V]
        grad_v += (w.mix.mT @ grad_heads).transpose(3, 4)
        grad_mix = grad_heads @ heads.mT
        grad_q, grad_k, grad_decay = w.backward(grad_mix, grad_reader, grad_writer, grad_start, grad_end, grad_total)
        return (grad_q * self.scale)[..., None, :], grad_k[..., None, :], grad_v, grad_decay, grad_state


class _HeadWeights:
    """Decays per head, log_decay [B, N, H, C], scale the values that are read and written; q, k [B, N, G, C, K]."""

    def __init__(self, q: Tensor, k: Tensor, log_decay: Tensor, keep: bool):
        self.reader, self.writer = q, k
        self.decays = HeadDecays(log_decay.unflatten(2, (q.shape[2], -1)))
        self.scores = (q @ k.mT)[:, :, :, None]
        self.mix = self.scores * self.decays.pairs  # [B, N, G, R, C, C]
        self.start, self.end = (x.mT[..., None] for x in (self.decays.start, self.decays.end))  # [B, N, G, C, R, 1]
        self.total = self.start[:, :, :, -1:]

    def backward(self, grad_mix, grad_reader, grad_writer, grad_start, grad_end, grad_total) -> tuple[Tensor, ...]:
        grad_mix *= self.decays.pairs
        grad_scores = grad_mix.sum(3)
        grad_pairs = grad_mix.mul_(self.scores)
        grad_start[:, :, :, -1:] += grad_total.sum(3, keepdim=True)
        grad_log_decay = self.decays.backward(grad_pairs, grad_start[..., 0].mT, grad_end[..., 0].mT)  # [B, N, G, R, C]
        grad_q, grad_k = grad_reader + grad_scores @ self.writer, grad_writer + grad_scores.mT @ self.reader
        return grad_q, grad_k, grad_log_decay.mT[..., None]


class _ChannelWeights:
    """Decays per channel scale the keys that are written and the queries that read; q, k, log_decay [B, N, H, C, K]."""

    start = end = None

    def __init__(self, q: Tensor, k: Tensor, log_decay: Tensor, keep: bool):
        self.q, self.k, self.own = q, k, decay_of(log_decay)
        self.decayed = q * self.own
        self.decays = ChannelDecays([self.decayed], [k], log_decay, keep)
        (self.reader,), (self.writer,), ((mix,),) = self.decays.readers, self.decays.writers, self.decays.products
        mix.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        self.mix = mix[:, :, :, None]  # [B, N, H, 1, C, C]
        self.total = self.decays.total.mT[..., None]  # [B, N, H, K, 1, 1]

    def backward(self, grad_mix, grad_reader, grad_writer, grad_start, grad_end, grad_total) -> tuple[Tensor, ...]:
        grad_mix = grad_mix[:, :, :, 0]
        grads = self.decays.backward([grad_reader], [grad_writer], [[grad_mix]], grad_total[..., 0].mT)
        (grad_decayed,), (grad_k,), grad_log_decay = grads
        present = grad_mix.diagonal(dim1=-2, dim2=-1)[..., None]
        grad_q = torch.addcmul(grad_decayed * self.own, present, self.k)
        grad_k.addcmul_(present, self.q)
        grad_log_decay.addcmul_(grad_decayed, self.decayed)
        return grad_q, grad_k, grad_log_decay[..., None, :]


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _as_values(x: Tensor, v: Tensor) -> Tensor:
    """[..., R V] -> [..., R, V]"""
    return x.unflatten(-1, v.shape[-2:])
