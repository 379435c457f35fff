"""The delta rule: a linear-attention state that corrects what it already predicts, instead of only adding.

    S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale * q_t^T S_t

    q, k  query and key, K channels (keys of length 1)      S     state [K, V], reads a value from a key
    v     value, V channels                                 beta  strength of the write: 1 replaces, 2 reflects
    g     log decay <= 0: none, per head, or per key channel

DeltaNet without decay (Yang et al. 2024, arXiv:2406.06484), Gated DeltaNet with one per head (arXiv:2412.06464), Kimi
Delta Attention with one per key channel (arXiv:2510.26692). beta in [0, 2] gives the transition negative eigenvalues
(Grazzi et al. 2024, arXiv:2411.12537). RWKV-7 (Peng et al. 2025, arXiv:2503.14456) erases along one vector what it
reads along another, and writes apart from that: S_t = exp(g_t) S_{t-1} - a_t (b_t^T S_{t-1}) + k_t v_t^T.
"""

import torch
from torch import Tensor

from ssm_trn.ops import parallel
from ssm_trn.ops.backends import find_kernel, select
from ssm_trn.ops.chunks import cut, fold_reset
from ssm_trn.ops.contexts import cast, full_precision
from ssm_trn.ops.delta_rule_chunks import Chunks

# On a CPU 16 and 64 are a few percent slower and 128 a quarter: larger chunks do more work, smaller ones more steps.
CHUNK_SIZE = 32
# Size of a tensor [N, B H, C, V] over the chunks that are computed at a time on a CPU: this bounds the memory.
SPAN = 2**19


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None = None,
    *,
    erase: tuple[Tensor, Tensor] | None = None,
    reset: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T and reads o_t = scale * q_t^T S_t.

    The rule is stable for keys of length 1 (normalise them) and beta in [0, 2]; other keys are computed as they are,
    and may grow without bound.

    Args:
        q, k: queries and keys [B, T, Hk, K]; Hk divides H, and a group of H / Hk neighbouring heads shares one.
        v: values [B, T, H, V].
        beta: write strengths [B, T, H]; None with `erase`.
        log_decay: g <= 0, per head [B, T, H] or per key channel [B, T, H, K], -inf included; None for no decay.
        erase: (a, b), each [B, T, H, K], for S_t = exp(g_t) S_{t-1} - a_t (b_t^T S_{t-1}) + k_t v_t^T instead.
        reset: bool [B, T]; True zeroes the state before that step.
        state: S before the first step [B, H, K, V], finite, or None for zeros.
        scale: of the queries.
        chunk_size: a hint for the chunked form; the result does not depend on it.

    Returns:
        o [B, T, H, V] in the dtype of v, and the state after the last step [B, H, K, V]: float32, or float64 where v
        is. Both carry gradients, to every input; second derivatives are not available.

    Raises:
        ValueError: if the shapes do not fit together, or if not exactly one of `beta` and `erase` is given.
    """
    if erase is None and beta is not None:
        correction = [beta[..., None]]  # [B, T, H, 1]
    elif beta is None and erase is not None and len(erase) == 2:
        correction = list(erase)  # [B, T, H, K]
    else:
        raise ValueError("delta_rule takes either beta or erase=(a, b): give exactly one of them")
    _check(q, k, v, beta, log_decay, erase, reset, state, chunk_size)
    batch, length, heads, values = v.shape
    arguments = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "erase": erase}
    arguments |= {"reset": reset, "state": state}
    if length > 1 and (kernel := find_kernel("delta_rule", arguments)):
        return kernel(**arguments, scale=scale)
    dtype = torch.promote_types(v.dtype, torch.float32)
    with full_precision(v.device):
        q, k = (_for_each_head(x, heads) for x in (q, k))
        if log_decay is None:
            log_decay = v.new_zeros(batch, length, heads, dtype=dtype)
        log_decay = fold_reset(cast(log_decay, dtype), reset)
        if log_decay.dim() == 3:
            log_decay = log_decay[..., None]  # [B, T, H, 1 or K]
        correction = [cast(x, dtype) for x in correction]
        if erase is not None and reset is not None:  # b reads the state before it decays, so a reset must reach it too
            correction[1] = correction[1].masked_fill(reset[..., None, None], 0)
        if state is None:
            state = v.new_zeros(batch, heads, q.shape[-1], values, dtype=dtype)
        forms = {"reference": reference, "torch": chunked, "parallel": at_once}
        form = select("delta_rule", forms, v.device)
        if length == 1:  # a decode step needs no chunk
            form = single
        out, state = form(q, k, v, log_decay, correction, cast(state, dtype), scale, chunk_size)
    return cast(out, v.dtype), state


def _check(q, k, v, beta, log_decay, erase, reset, state, chunk_size) -> None:
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            "q and k must be [batch, time, key heads, K] and v [batch, time, heads, V], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    batch, length, heads, values = v.shape
    if length == 0:
        raise ValueError("delta_rule needs at least one time step, got none")
    if heads % q.shape[2]:
        raise ValueError(f"{heads} value heads cannot be shared evenly by {q.shape[2]} key heads")
    per_head, per_channel = (batch, length, heads), (batch, length, heads, q.shape[-1])
    allowed = [("beta", beta, [per_head]), ("log_decay", log_decay, [per_head, per_channel])]
    allowed += [(f"erase[{i}]", x, [per_channel]) for i, x in enumerate(erase or ())]
    allowed += [("reset", reset, [(batch, length)]), ("state", state, [(batch, heads, q.shape[-1], values)])]
    for name, x, shapes in allowed:
        if x is not None and x.shape not in shapes:
            raise ValueError(f"{name} must be {' or '.join(str(list(s)) for s in shapes)}, got {list(x.shape)}")
    if reset is not None and reset.dtype != torch.bool:
        raise ValueError(f"reset must be a bool tensor, got {reset.dtype}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, Hk, K] -> [B, T, H, K]"""
    return x if x.shape[2] == heads else x[:, :, :, None].expand(-1, -1, -1, heads // x.shape[2], -1).flatten(2, 3)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    correction: list[Tensor],
    state: Tensor,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as a plain loop, in the dtype of the state.

    q, k [B, T, H, K], v [B, T, H, V], log_decay [B, T, H, 1 or K], state [B, H, K, V]; correction: [beta] [B, T, H, 1]
    or, for `erase`, [a, b] [B, T, H, K].
    """
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    # unbind, not x[:, t]: the gradient of each x[:, t] is as large as x, and so the backward pass O(T^2).
    columns = [x[..., None].unbind(1) for x in (q, k, log_decay.exp(), *correction)]  # [B, H, K, 1] for each step
    rows = v[..., None, :].unbind(1)  # [B, H, 1, V] for each step
    outputs = []
    for v_t, q_t, k_t, decay_t, *correction_t in zip(rows, *columns, strict=True):
        out_t, state = _step(q_t, k_t, v_t, decay_t, correction_t, state)
        outputs.append(out_t)
    return scale * torch.stack(outputs, 1).squeeze(-2), state


def _step(q, k, v, decay, correction, state: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the recurrence: q, k, correction [..., H, K or 1, 1], decay [..., H, 1 or K, 1], v [..., H, 1, V]."""
    decayed = decay * state  # [..., H, K, V]
    if len(correction) == 1:
        (beta,) = correction
        state = torch.addcmul(decayed, k, beta * (v - k.mT @ decayed))
    else:
        a, b = correction
        state = torch.addcmul(decayed, a, b.mT @ state, value=-1).addcmul_(k, v)
    return q.mT @ state, state


def single(q, k, v, log_decay, correction, state: Tensor, scale: float, chunk_size) -> tuple[Tensor, Tensor]:
    """`reference` for T = 1, without the loop around the step."""
    q, k, decay, *correction = (cast(x, state.dtype)[..., None] for x in (q, k, log_decay.exp(), *correction))
    out, state = _step(q, k, cast(v, state.dtype)[..., None, :], decay, correction, state.unsqueeze(1))
    return (scale * out).squeeze(-2), state.squeeze(1)  # [B, 1, H, V], [B, H, K, V]


# The chunked form (DeltaNet, section 3; Gated DeltaNet, section 3.3). Both rules are one, with a reader r, a writer w:
#
#     S_t = exp(g_t) S_{t-1} + w_t z_t^T        z_t = beta_t (y_t - r_t^T exp(g_t) S_{t-1})
#
# The delta rule has r = w = k and y = v. `erase` takes two such steps with beta = 1: one with w = a, y = 0 and r = b,
# where b reads S_{t-1} before its decay, then one with w = k, y = v and r = 0, without decay.
#
# In a chunk that starts from S, with D_ts = exp(g_{s+1} + ... + g_t), the z solve a unit triangular system,
#
#     z_t + beta_t sum_{s<t} (r_t^T D_ts w_s) z_s = beta_t (y_t - (D_t0 r_t)^T S)
#
# by substitution: an inverse made of powers is wrong by orders of magnitude when the keys are similar. Then
#
#     o_t = (D_t0 q_t)^T S + sum_{s<=t} (q_t^T D_ts w_s) z_s        S' = D_C0 S + sum_s (D_Cs w_s) z_s^T
#
# The backward pass keeps the inputs, z and the states that enter the chunks, and computes the rest of a chunk again.
# Forward and backward are custom operators, so that torch.compile takes them whole and does not unroll the loop.
#
# What happens inside the chunks is in delta_rule_chunks.py.


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    correction: list[Tensor],
    state: Tensor,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The same as `reference`, by matrix products over chunks of steps."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_decay, *correction, state))
    size = 1 << ((chunk_size or CHUNK_SIZE) - 1).bit_length()
    steps = _steps(q, k, v, log_decay, correction)
    out, final, *_ = _run(*steps, state, size, scale, len(correction) == 1, keep)
    return (out if len(correction) == 1 else out[:, 1::2]), final


def at_once(q, k, v, log_decay, correction, state: Tensor, scale: float, chunk_size) -> tuple[Tensor, Tensor]:
    """The same as `reference`, for all chunks at once (parallel.py)."""
    steps = _steps(q, k, v, log_decay, correction)
    out, final = parallel.delta_rule(steps, state, chunk_size, scale, len(correction) == 1)
    return (out if len(correction) == 1 else out[:, 1::2]), final


def _steps(q, k, v, log_decay, correction: list[Tensor]) -> tuple[Tensor, ...]:
    """q, r, w, log_decay, y, beta: two steps for each with `erase`, of which the second reads o."""
    if len(correction) == 1:
        return q, k, k, log_decay, v, *correction

    def in_turn(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], 2).flatten(1, 2)  # [B, 2 T, H, X]

    a, b = correction
    q, k, v = (x.to(a.dtype) for x in (q, k, v))
    log_decay = log_decay.expand_as(k)
    no_key, no_value = torch.zeros_like(k), torch.zeros_like(v)
    q, r, w, y = in_turn(no_key, q), in_turn(b, no_key), in_turn(a, k), in_turn(no_value, v)
    return q, r, w, in_turn(log_decay, no_key), y, torch.ones_like(y[..., :1])


@torch.library.custom_op("ssm_trn::delta_rule", mutates_args=())
def _run(
    q: Tensor,
    r: Tensor,
    w: Tensor,
    log_decay: Tensor,
    y: Tensor,
    beta: Tensor,
    state: Tensor,
    size: int,
    scale: float,
    decay_first: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and, if `keep`, z and the states that enter the chunks [N, B H, K, V].

    q, r, w [B, T, H, K], log_decay [B, T, H, 1 or K], y [B, T, H, V], beta [B, T, H, 1]. Without `decay_first`, r reads
    S_{t-1} before its decay.
    """
    batch, length, heads, _ = y.shape
    inputs = [cut(x, size) for x in (q, r, w, log_decay, y, beta)]  # [B, N, C, H, X]
    out = y.new_empty(inputs[4].shape)
    z, entering = _room(y, state, size, keep)
    state = state.flatten(0, 1)
    for span in _spans(out):
        chunks = Chunks([_heads_first(x[:, span], state.dtype) for x in inputs], scale, decay_first, keep=False)
        result, state = chunks.forward(state, z[span] if keep else None, entering[span] if keep else None)
        out[:, span] = _heads_last(result, batch)
    return out.flatten(1, 2)[:, :length].contiguous(), state.unflatten(0, (batch, heads)), z, entering


@_run.register_fake
def _(q, r, w, log_decay, y, beta, state, size, scale, decay_first, keep):
    return y.new_empty(y.shape), state.new_empty(state.shape), *_room(y, state, size, keep)


@torch.library.custom_op("ssm_trn::delta_rule_backward", mutates_args=())
def _run_backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    r: Tensor,
    w: Tensor,
    log_decay: Tensor,
    y: Tensor,
    beta: Tensor,
    z: Tensor,
    entering: Tensor,
    size: int,
    scale: float,
    decay_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, r, w, log_decay, y, beta and the state."""
    batch, length, heads, _ = y.shape
    grad_out, *inputs = (cut(x, size) for x in (grad_out, q, r, w, log_decay, y, beta))
    grads = [x.new_empty(x.shape) for x in inputs]
    grad_state = grad_final.flatten(0, 1)
    for span in reversed(_spans(grad_out)):
        chunks = Chunks([_heads_first(x[:, span], z.dtype) for x in inputs], scale, decay_first, keep=True)
        grad_span = _heads_first(grad_out[:, span], z.dtype)
        *parts, grad_state = chunks.backward(grad_span, grad_state, z[span], entering[span])
        for grad, part in zip(grads, parts, strict=True):
            grad[:, span] = _heads_last(part, batch)
    return *(x.flatten(1, 2)[:, :length].contiguous() for x in grads), grad_state.unflatten(0, (batch, heads))


@_run_backward.register_fake
def _(grad_out, grad_final, q, r, w, log_decay, y, beta, z, entering, size, scale, decay_first):
    return tuple(x.new_empty(x.shape) for x in (q, r, w, log_decay, y, beta, grad_final))


def _keep_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.size, ctx.scale, ctx.decay_first, _ = inputs
    ctx.save_for_backward(*tensors[:-1], *output[2:])  # the initial state is the first that enters a chunk
    ctx.set_materialize_grads(False)  # what is kept gets no gradient, not even zeros


def _backward(ctx, grad_out: Tensor | None, grad_final: Tensor | None, *_) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing computes them anew at each reading
    y, entering = saved[4], saved[7]
    if grad_out is None:
        grad_out = torch.zeros_like(y)
    if grad_final is None:
        grad_final = torch.zeros_like(entering[0]).unflatten(0, (len(y), -1))
    grads = _run_backward(grad_out, grad_final, *saved, ctx.size, ctx.scale, ctx.decay_first)
    return *grads, None, None, None, None


_run.register_autograd(_backward, setup_context=_keep_for_backward)


def _room(y: Tensor, state: Tensor, size: int, keep: bool) -> tuple[Tensor, Tensor]:
    """Room for z and for the states that enter the chunks."""
    batch, length, heads, values = y.shape
    count = -(-length // size) if keep else 0
    return state.new_empty(count, batch * heads, size, values), state.new_empty(count, batch * heads, *state.shape[2:])


def _spans(x: Tensor) -> list[slice]:
    """The chunks of x [B, N, C, H, X] to compute at a time: some on a CPU, elsewhere all."""
    count = x.shape[1]
    step = max(1, SPAN * count // x.numel()) if x.device.type == "cpu" else count
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N, C, H, X] -> [N, B H, C, X]."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2).to(dtype).contiguous()


def _heads_last(x: Tensor, batch: int) -> Tensor:
    """[N, B H, C, X] -> [B, N, C, H, X], a view."""
    return x.unflatten(1, (batch, -1)).permute(1, 0, 3, 2, 4)
