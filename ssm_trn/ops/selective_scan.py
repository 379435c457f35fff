"""The selective scan of Mamba (S6) and its relatives: one linear recurrence per channel and state.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = C_t h_t + D x_t

    x   input, per channel                 A   rate of decay, per channel and state, real part <= 0
    dt  step size, per channel             B   how the input is written to the states
    h   states, N per channel              C   how the states are read        D   skip connection

With B and C that depend on the input this is Mamba (Gu and Dao 2023, arXiv:2312.00752, algorithm 2). With complex A, B,
C that do not it is S4D (Gu et al. 2022, arXiv:2206.11893) or the LRU (Orvieto et al. 2023, arXiv:2303.06349); a complex
state stands for itself and its conjugate, so y_t = 2 Re(C_t h_t) + D x_t. With one state, no B and C, and
`scale_input=False` it is the gated RNN h_t = exp(dt_t A) h_{t-1} + x_t: RG-LRU, minGRU, HGRN.
"""

import torch
from torch import Tensor

from ssm_trn.ops.backends import find_kernel, require_complex, select
from ssm_trn.ops.contexts import cast, full_precision
from ssm_trn.ops.parallel import recurrence
from ssm_trn.ops.scan_blocks import LARGEST_STEP, chunked


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    *,
    scale_input: bool = True,
    negative_eigenvalues: bool = False,
    reset: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t and reads y_t = C_t h_t + D x_t, for any number of steps.

    Args:
        x: input [B, T, D].
        dt: step sizes >= 0 [B, T, D]; 0 leaves the state as it is, inf erases what was before.
        A: rates [D, N], real or complex, real part <= 0.
        B, C: per step and group of channels [B, T, G, N] (G divides D), or for all steps [D, N], or None for ones.
        D: weight of the skip connection [D], or None for no skip.
        scale_input: whether the input is multiplied by dt; without it h_t = exp(dt_t A) h_{t-1} + x_t B_t.
        negative_eigenvalues: 2 exp(dt_t A) - 1 in place of exp(dt_t A), so that a state can change its sign: the range
            is [-1, 1] then (Grazzi et al. 2024, arXiv:2411.12537). For real A.
        reset: bool [B, T]; True zeroes the state before that step.
        state: h before the first step [B, D, N], finite, or None for zeros.

    Returns:
        y [B, T, D] in the dtype of x, and the state after the last step [B, D, N]: float32, or float64 where x is, or
        the complex type of that precision if one of A, B, C is complex. Both carry gradients, to every input; second
        derivatives are not available.

    Raises:
        ValueError: if the shapes do not fit together, or for complex numbers on a device that has none.
    """
    _check(x, dt, A, B, C, D, reset, state)
    arguments: dict = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "reset": reset, "state": state}
    arguments |= {"scale_input": scale_input, "negative_eigenvalues": negative_eigenvalues}
    if x.shape[1] > 1 and (kernel := find_kernel("selective_scan", arguments)):
        return kernel(**arguments)
    real = torch.promote_types(x.dtype, torch.float32)
    is_complex = any(t is not None and t.is_complex() for t in (A, B, C))
    dtype = torch.promote_types(real, torch.complex32) if is_complex else real
    A = cast(A, dtype)
    B, C = (torch.ones_like(A) if t is None else cast(t, dtype) for t in (B, C))
    if is_complex:
        require_complex(x.device)
        C = 2 * C
    if D is not None:
        D = cast(D, real)
    if negative_eigenvalues and A.is_complex():
        raise ValueError("negative_eigenvalues is for real A: a complex A has eigenvalues of every sign without it")
    state = A.new_zeros(x.shape[0], *A.shape) if state is None else cast(state, dtype)
    forms = {"reference": reference, "torch": chunked, "parallel": parallel}
    form = select("selective_scan", forms, x.device)
    if x.shape[1] == 1:  # a decode step needs no blocks, and no guard: autocast leaves its operators alone
        return single(x, dt, A, B, C, D, state, reset, scale_input, negative_eigenvalues)
    with full_precision(x.device):
        return form(x, dt, A, B, C, D, state, reset, scale_input, negative_eigenvalues)


def reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
    scale_input: bool,
    negative: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence as a plain loop, with y_t = Re(C_t h_t) + D x_t. A, B, C and the state have one dtype."""
    real = torch.promote_types(x.dtype, torch.float32)
    inputs, steps = x.to(real), dt.to(real).clamp(max=LARGEST_STEP)
    writes, reads = (_for_each_channel(t, x) for t in (B, C))  # [B, T, D, N]
    outputs = []
    for t, (x_t, dt_t, B_t, C_t) in enumerate(zip(*(s.unbind(1) for s in (inputs, steps, writes, reads)), strict=True)):
        reset_t = None if reset is None else reset[:, t]
        y_t, state = _step(x_t, dt_t, A, B_t, C_t, D, state, reset_t, scale_input, negative)
        outputs.append(y_t)
    return torch.stack(outputs, 1).to(x.dtype), state


def _step(x, dt, A, B, C, D, state, reset, scale_input: bool, negative: bool) -> tuple[Tensor, Tensor]:
    """One step of the recurrence: x, dt [..., D]; B, C [..., D, N] or what broadcasts to it; reset bool [...]."""
    decay = torch.exp(dt[..., None] * A)  # [..., D, N]
    if negative:
        decay = 2 * decay - 1
    if reset is not None:
        decay = decay.masked_fill(reset[..., None, None], 0)
    written = dt * x if scale_input else x  # [..., D]
    state = torch.addcmul(written[..., None] * B, decay, state)
    y = (C * state).sum(-1).real  # [..., D]
    return y if D is None else torch.addcmul(y, D, x), state


def single(x, dt, A, B, C, D, state, reset, scale_input: bool, negative: bool) -> tuple[Tensor, Tensor]:
    """`reference` for T = 1, without the loop around the step."""
    real = torch.promote_types(x.dtype, torch.float32)
    # [D, N] and [B, 1, 1, N] broadcast as they are
    B, C = (c if c.dim() == 2 or c.shape[2] == 1 else _for_each_channel(c, x) for c in (B, C))
    dt = cast(dt, real).clamp(max=LARGEST_STEP)
    y, state = _step(cast(x, real), dt, A, B, C, D, state.unsqueeze(1), reset, scale_input, negative)
    return cast(y, x.dtype), state.squeeze(1)  # y [B, 1, D], state [B, D, N]


def parallel(x, dt, A, B, C, D, state, reset, scale_input: bool, negative: bool) -> tuple[Tensor, Tensor]:
    """The same as `reference`, for all steps at once (parallel.py); it keeps decays and states [B, T, D, N]."""
    real = torch.promote_types(x.dtype, torch.float32)
    inputs, dt = x.to(real), dt.to(real).clamp(max=LARGEST_STEP)
    decay = torch.exp(dt[..., None] * A)  # [B, T, D, N]
    if negative:
        decay = 2 * decay - 1
    if reset is not None:
        decay = decay.masked_fill(reset[..., None, None], 0)
    written = dt * inputs if scale_input else inputs
    states = recurrence(decay, written[..., None] * _for_each_channel(B, x), state)  # [B, T + 1, D, N]
    y = (_for_each_channel(C, x) * states[:, 1:]).sum(-1).real
    return (y if D is None else y + D * inputs).to(x.dtype), states[:, -1]


def _for_each_channel(coefficient: Tensor, x: Tensor) -> Tensor:
    """B or C, [D, N] or [B, T, G, N], for every step and channel: [B, T, D, N]."""
    if coefficient.dim() == 2:
        return coefficient.expand(*x.shape[:2], -1, -1)
    of_each_group = x.shape[2] // coefficient.shape[2]
    return coefficient[:, :, :, None].expand(-1, -1, -1, of_each_group, -1).flatten(2, 3)


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    reset: Tensor | None,
    state: Tensor | None,
) -> None:
    shape, rates, groups = x.shape, A.shape, []
    if len(shape) != 3 or shape[1] == 0:
        raise ValueError(f"x must be [batch, time >= 1, channels], got {list(shape)}")
    batch, length, channels = shape
    if dt.shape != shape:
        raise ValueError(f"dt must have the shape of x, {list(shape)}, got {list(dt.shape)}")
    if len(rates) != 2 or rates[0] != channels:
        raise ValueError(f"A must be [channels = {channels}, states], got {list(rates)}")
    for name, t in (("B", B), ("C", C)):
        of_steps = rates if t is None else t.shape
        if of_steps == rates:
            continue
        if len(of_steps) != 4 or of_steps[:2] != shape[:2] or of_steps[3] != rates[1] or channels % of_steps[2]:
            raise ValueError(
                f"{name} must be [{batch}, {length}, groups, {rates[1]}] with groups that divide {channels} "
                f"channels, or {list(rates)} for all steps, got {list(of_steps)}"
            )
        groups.append(of_steps[2])
    if len(set(groups)) > 1:
        raise ValueError(f"B and C must have the same number of groups, got {groups[0]} and {groups[1]}")
    if D is not None and D.shape != (channels,):
        raise ValueError(f"D must be [channels = {channels}], got {list(D.shape)}")
    if reset is not None and (reset.shape != (batch, length) or reset.dtype != torch.bool):
        raise ValueError(f"reset must be bool [{batch}, {length}], got {reset.dtype} {list(reset.shape)}")
    if state is not None and state.shape != (batch, *rates):
        raise ValueError(f"state must be {[batch, *rates]}, got {list(state.shape)}")
    if state is not None and state.is_complex() and not any(t is not None and t.is_complex() for t in (A, B, C)):
        raise ValueError("the state is complex but A, B and C are real: make one of them complex or the state real")
