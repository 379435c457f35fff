"""The NKI kernels of ssm_nki as forms of the ops: for AWS Trainium and, simulated, for CPU tensors.

On an XLA device of Trainium the kernels run as compiled by the Neuron SDK. On the CPU they run in the simulator of
ssm_nki, slowly, and only when asked for by `use_backend("nki")`.

What kernels are promised, and this file sees to: activations of one type, float32 or bfloat16; all else in float32; log
decays that are finite, where a reset or -inf becomes CLOSED. nki_operators.py holds the operators that call them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ssm_trn.ops.contexts import cast
from ssm_trn.ops.nki_operators import delta_rule, initial_state, linear_attention, selective_scan, short_conv

CLOSED = -104.0  # exp of it is 0 in float32
LARGEST_STEP = 1e30  # of the selective scan, as in its other forms


def _linear_attention(q, k, v, log_decay, bonus, reset, state, scale: float) -> tuple[Tensor, Tensor]:
    q, k, values = _of_one_type(q, k, v)
    log_decay, state = _finite_decay(log_decay, reset, v), initial_state(state, q, v)
    keep = _needs_grad(q, k, v, log_decay, state)
    out, final, _ = linear_attention(q, k, values, log_decay, state, scale, keep)
    return cast(out, v.dtype), final


def _delta_rule(q, k, v, beta, log_decay, erase, reset, state, scale: float) -> tuple[Tensor, Tensor]:
    q, k, values = _of_one_type(q, k, v)
    log_decay, state = _finite_decay(log_decay, reset, v), initial_state(state, q, v)
    keep = _needs_grad(q, k, v, beta, log_decay, state)
    out, final, *_ = delta_rule(q, k, values, beta.float(), log_decay, state, scale, keep)
    return cast(out, v.dtype), final


def _selective_scan(x, dt, A, B, C, D, scale_input: bool, negative_eigenvalues: bool, reset, state):
    B, C = (None if coefficient is None else coefficient.squeeze(2) for coefficient in (B, C))  # [B, T, N]
    inputs, B, C = _of_one_type(x, B, C)
    dt, A, D = dt.float().clamp(max=LARGEST_STEP), A.float(), None if D is None else D.float()
    state = A.new_zeros(len(x), *A.shape) if state is None else state.float()
    reset = None if reset is None else reset.float()
    keep = _needs_grad(x, dt, A, B, C, D, state)
    y, final, _ = selective_scan(inputs, dt, A, B, C, D, state, reset, scale_input, keep)
    return cast(y, x.dtype), final


def _short_conv(x, weight, bias, state, age, silu: bool) -> Tensor:
    taps = weight.shape[1]
    lags = torch.arange(taps - 1, -1, -1, device=x.device)
    reads = None if age is None else (age[:, None, :] >= lags[:, None]).to(x.dtype)  # [B, W, T]
    bias = None if bias is None else bias.float()
    return short_conv(x, weight.float(), bias, state if taps > 1 else None, reads, silu)


KERNELS: dict[str, Callable] = {
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
    "selective_scan": _selective_scan,
    "short_conv": _short_conv,
}


def _of_one_type(*activations: Tensor | None) -> list[Tensor | None]:
    types = {x.dtype for x in activations if x is not None}
    dtype = types.pop() if len(types) == 1 else torch.float32
    return [None if x is None else cast(x, dtype) for x in activations]


def _finite_decay(log_decay: Tensor | None, reset: Tensor | None, v: Tensor) -> Tensor | None:
    """log_decay with the resets, float32 and at least CLOSED; None where there is neither."""
    if log_decay is None:
        if reset is None:
            return None
        log_decay = v.new_zeros(v.shape[:3])
    log_decay = log_decay.float().clamp(min=CLOSED)
    if reset is None:
        return log_decay
    return log_decay.masked_fill(reset.reshape(reset.shape + (1,) * (log_decay.dim() - 2)), CLOSED)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
