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

import math

import torch
from torch import Tensor

from ssm_trn.ops.backends import select
from ssm_trn.ops.contexts import full_precision, one_thread

# An infinite step size is a full decay (and, where it scales the input, a huge write). It is cut to a finite one, so
# that inf * 0 makes no NaN in a gradient.
LARGEST_STEP = 1e30


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
        ValueError: if the shapes do not fit together.
    """
    _check(x, dt, A, B, C, D, reset, state)
    real = torch.promote_types(x.dtype, torch.float32)
    is_complex = any(t is not None and t.is_complex() for t in (A, B, C))
    dtype = torch.promote_types(real, torch.complex32) if is_complex else real
    A = A.to(dtype)
    B, C = (torch.ones_like(A) if t is None else t.to(dtype) for t in (B, C))
    if is_complex:
        C = 2 * C
    if D is not None:
        D = D.to(real)
    if negative_eigenvalues and A.is_complex():
        raise ValueError("negative_eigenvalues is for real A: a complex A has eigenvalues of every sign without it")
    state = A.new_zeros(x.shape[0], *A.shape) if state is None else state.to(dtype)
    form = select("selective_scan", {"reference": reference, "torch": chunked})
    if x.shape[1] == 1:  # a decode step needs no blocks
        form = single
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
    """One step of the recurrence: x, dt [B, D]; B, C [B, D, N] or what broadcasts to it; reset bool [B] or None."""
    decay = torch.exp(dt[..., None] * A)  # [B, D, N]
    if negative:
        decay = 2 * decay - 1
    if reset is not None:
        decay = decay.masked_fill(reset[:, None, None], 0)
    written = dt * x if scale_input else x  # [B, D]
    state = torch.addcmul(written[..., None] * B, decay, state)
    y = (C * state).sum(-1).real  # [B, D]
    return y if D is None else torch.addcmul(y, D, x), state


def single(x, dt, A, B, C, D, state, reset, scale_input: bool, negative: bool) -> tuple[Tensor, Tensor]:
    """`reference` for T = 1, without the loop around the step."""
    real = torch.promote_types(x.dtype, torch.float32)
    one_group = all(c.dim() == 2 or c.shape[2] == 1 for c in (B, C))  # [D, N] or [B, 1, 1, N] broadcast as they are
    B, C = (c if c.dim() == 2 else (c if one_group else _for_each_channel(c, x))[:, 0] for c in (B, C))
    reset = None if reset is None else reset[:, 0]
    dt = dt[:, 0].to(real).clamp(max=LARGEST_STEP)
    y, state = _step(x[:, 0].to(real), dt, A, B, C, D, state, reset, scale_input, negative)
    return y[:, None].to(x.dtype), state


def _for_each_channel(coefficient: Tensor, x: Tensor) -> Tensor:
    """B or C, [D, N] or [B, T, G, N], for every step and channel: [B, T, D, N]."""
    if coefficient.dim() == 2:
        return coefficient.expand(*x.shape[:2], -1, -1)
    of_each_group = x.shape[2] // coefficient.shape[2]
    return coefficient[:, :, :, None].expand(-1, -1, -1, of_each_group, -1).flatten(2, 3)


# The chunked form. A scan does one multiplication and one addition for each exponential, so memory bounds it. The
# [B, T, D, N] tensors (decays, states and their gradients) therefore exist only for a block of steps at a time, in
# buffers that stay in the cache, and the backward pass computes them again from the inputs and from the state that
# entered the block. In a block time is the first axis: a step is then one contiguous piece and is updated in place.
# Forward and backward are custom operators, so that torch.compile takes them whole and does not unroll the loop.
#
# Shapes in a block: Q steps, R rows of the batch, G groups, N states, P = D / G channels of a group.


def chunked(*inputs) -> tuple[Tensor, Tensor]:
    """The same as `reference`, block by block; keeps the inputs and one state per block for the backward pass."""
    keep = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
    y, final, _ = _scan(*inputs, keep)
    return y, final


@torch.library.custom_op("ssm_trn::selective_scan", mutates_args=())
@one_thread()
def _scan(
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
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state, and if `keep` the states that enter the blocks."""
    call = _Call(x, dt, A, B, C, D, reset, scale_input, negative)
    y, entering = torch.empty_like(x, memory_format=torch.contiguous_format), call.states_between(keep)
    y_view = call.time_first(y)
    entering[0] = call.states_first(state)
    for rows in call.rows:
        buffers = call.buffers(2, rows)
        for i, times in enumerate(call.times):
            block = _Block(call, times, rows)
            decay, h = (buffer.first(len(block.x)) for buffer in buffers)
            before, after = (i, i + 1) if keep else (0, 0)
            block.recur(entering[before, rows], decay, h)
            entering[after, rows] = h.steps[-1]
            y_block = _sum_states(block.C, h.whole)  # [Q, R, G, 1, P]
            y_view[times, rows] = y_block if call.D is None else y_block.addcmul_(block.x, call.D)
    return y, call.channels_first(entering[-1]), entering


@_scan.register_fake
def _(x, dt, A, B, C, D, state, reset, scale_input, negative, keep):
    entering = _Call(x, dt, A, B, C, D, reset, scale_input, negative).states_between(keep)
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(state), entering


@torch.library.custom_op("ssm_trn::selective_scan_backward", mutates_args=())
@one_thread()
def _scan_backward(
    grad_y: Tensor,
    grad_final: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    entering: Tensor,
    reset: Tensor | None,
    scale_input: bool,
    negative: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, dt, A, B, C, D (empty without D) and the state."""
    # The gradient of a product of complex numbers holds the conjugates of its factors. So all of this pass runs on
    # conjugates, and no line below needs to say so; a real number is its own conjugate.
    A, B, C, entering = (t.conj().resolve_conj() for t in (A, B, C, entering))
    call = _Call(x, dt, A, B, C, D, reset, scale_input, negative)
    grad_x, grad_dt = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt))
    grad_x_view, grad_dt_view, grad_y_view = (call.time_first(t) for t in (grad_x, grad_dt, grad_y))
    grad_A, grad_B, grad_C = (t.new_zeros(t.shape) for t in (call.A, call.B, call.C))
    grad_D = x.new_zeros(0) if call.D is None else torch.zeros_like(call.D)
    grad_state = call.states_first(grad_final).clone()  # of the state that leaves the block [B, G, N, P]
    for rows in call.rows:
        buffers = call.buffers(3, rows)
        for i, times in reversed(list(enumerate(call.times))):
            block = _Block(call, times, rows)
            decay, h, grad_h = (buffer.first(len(block.x)) for buffer in buffers)
            block.recur(entering[i, rows], decay, h)
            grad_y_block = grad_y_view[times, rows].to(call.real)
            _add_coefficient_gradient(grad_C, times, rows, h.whole, grad_y_block)
            torch.mul(grad_y_block, block.C, out=grad_h.whole)
            block.recur_back(grad_state[rows], decay, grad_h)
            _add_coefficient_gradient(grad_B, times, rows, grad_h.whole, block.written)
            grad_written = _sum_states(block.B, grad_h.whole)  # [Q, R, G, 1, P]

            grad_exponent = decay.whole
            if negative:  # the derivative of 2 exp(a) - 1 is that value + 1
                grad_exponent.add_(grad_h.whole if block.kept is None else grad_h.whole * block.kept)
            grad_exponent[1:].mul_(h.whole[:-1])
            grad_exponent[0].mul_(entering[i, rows])
            grad_A += torch.mul(grad_exponent, block.dt, out=h.whole).sum((0, 1))
            grad_dt_block = torch.mul(grad_exponent, call.A, out=h.whole).sum(-2, keepdim=True).real
            if scale_input:
                grad_dt_block.addcmul_(grad_written, block.x)
                grad_written.mul_(block.dt)
            if call.D is not None:
                grad_written.addcmul_(grad_y_block, call.D)
                grad_D += (grad_y_block * block.x).sum((0, 1))
            grad_x_view[times, rows], grad_dt_view[times, rows] = grad_written, grad_dt_block
    grad_A, grad_B, grad_C = (call.coefficient_back(grad) for grad in (grad_A, grad_B, grad_C))
    return grad_x, grad_dt, grad_A, grad_B, grad_C, grad_D.flatten(), call.channels_first(grad_state)


@_scan_backward.register_fake
def _(grad_y, grad_final, x, dt, A, B, C, D, entering, reset, scale_input, negative):
    inputs = (x, dt, A, B, C, x.new_zeros(0) if D is None else D, grad_final)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs)


def _keep_for_backward(ctx, inputs, output) -> None:
    x, dt, A, B, C, D, _, reset, *ctx.flags, _ = inputs
    ctx.save_for_backward(x, dt, A, B, C, D, output[2], reset)
    ctx.set_materialize_grads(False)  # the states between blocks get no gradient, not even zeros


def _backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None, _) -> tuple[Tensor | None, ...]:
    x, dt, A, B, C, D, entering, reset = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    if grad_final is None:
        grad_final = A.new_zeros(x.shape[0], *A.shape)
    with full_precision(x.device):
        *grads, grad_D, grad_state = _scan_backward(grad_y, grad_final, x, dt, A, B, C, D, entering, reset, *ctx.flags)
    return *grads, None if D is None else grad_D, grad_state, None, None, None, None


_scan.register_autograd(_backward, setup_context=_keep_for_backward)


class _Call:
    """The inputs of one call as views with time first, and how it is cut into blocks of steps and rows."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        reset: Tensor | None,
        scale_input: bool,
        negative: bool,
    ):
        self.groups = next((c.shape[2] for c in (B, C) if c.dim() == 4), 1)
        self.real, self.scale_input, self.negative = A.dtype.to_real(), scale_input, negative
        self.x, self.dt = self.time_first(x), self.time_first(dt)
        self.A, self.B, self.C = self.coefficient(A), self.coefficient(B), self.coefficient(C)
        self.A_log2 = self.A / math.log(2)  # exp(dt A) = exp2(dt A_log2), which is faster on many processors
        self.D = None if D is None else D.view(self.groups, 1, -1)  # [G, 1, P]
        self.kept = None  # 0 at a reset, else 1: [T, B, 1, 1, 1]
        if reset is not None:
            self.kept = (~reset).to(self.real).T[..., None, None, None]
        length, batch = self.x.shape[:2]
        # On a CPU the buffers of a block should fit the second-level cache, and a step outweigh the calls that compute
        # it; elsewhere it is the number of calls that counts. With at least N / 2 steps in a block, what is saved, one
        # state per block, is at most twice the input.
        step, block = (2**14, 3 * 2**16) if x.device.type == "cpu" else (2**62, 2**24)
        row_count = min(batch, max(1, step // A.numel()))
        step_count = min(length, max(block // (row_count * A.numel()), min(A.shape[1] // 2, 32), 1))
        self.rows = [slice(start, min(start + row_count, batch)) for start in range(0, batch, row_count)]
        self.times = [slice(start, min(start + step_count, length)) for start in range(0, length, step_count)]

    def buffers(self, count: int, rows: slice) -> list["_Buffer"]:
        shape = (self.times[0].stop, rows.stop - rows.start, *self.A.shape)  # [Q, R, G, N, P]
        return [_Buffer(self.A.new_empty(shape)) for _ in range(count)]

    def states_between(self, keep: bool) -> Tensor:
        count = len(self.times) + 1 if keep else 1
        return self.A.new_empty(count, self.x.shape[1], *self.A.shape)  # [count, B, G, N, P]

    def time_first(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1).unflatten(-1, (self.groups, 1, -1))  # [B, T, D] -> [T, B, G, 1, P]

    def coefficient(self, t: Tensor) -> Tensor:
        """A, B or C: [D, N] -> [G, N, P], or [B, T, G, N] -> [T, B, G, N, 1]."""
        return self.states_first(t) if t.dim() == 2 else t.transpose(0, 1)[..., None]

    def coefficient_back(self, t: Tensor) -> Tensor:
        return self.channels_first(t) if t.dim() == 3 else t[..., 0].transpose(0, 1).contiguous()

    def states_first(self, t: Tensor) -> Tensor:
        return t.unflatten(-2, (self.groups, -1)).mT.contiguous()  # [..., D, N] -> [..., G, N, P]

    def channels_first(self, t: Tensor) -> Tensor:
        # Always a copy: what a custom operator returns must not share memory with anything else.
        return t.mT.flatten(-3, -2).clone(memory_format=torch.contiguous_format)  # [..., G, N, P] -> [..., D, N]


class _Block:
    """What the steps of one block read, in shapes that broadcast to [Q, R, G, N, P], and the recurrence over them."""

    def __init__(self, call: _Call, times: slice, rows: slice):
        self.A_log2 = call.A_log2
        self.x = call.x[times, rows].to(call.real)
        self.dt = call.dt[times, rows].to(call.real).clamp(max=LARGEST_STEP)
        self.written = self.dt * self.x if call.scale_input else self.x
        self.B, self.C = (c if c.dim() == 3 else c[times, rows] for c in (call.B, call.C))
        self.kept = None if call.kept is None else call.kept[times, rows]
        self.negative = call.negative

    def recur(self, entering: Tensor, decay: "_Buffer", h: "_Buffer") -> None:
        """Fills `decay` with exp(dt A) and `h` with the states, from the state that enters the block [R, G, N, P]."""
        torch.mul(self.dt, self.A_log2, out=decay.whole).exp2_()
        if self.negative:
            decay.whole.mul_(2).sub_(1)
        if self.kept is not None:
            decay.whole.mul_(self.kept)
        torch.mul(self.written, self.B, out=h.whole)
        for decay_q, h_q in zip(decay.steps, h.steps, strict=True):
            h_q.addcmul_(decay_q, entering)
            entering = h_q

    def recur_back(self, leaving: Tensor, decay: "_Buffer", grad_h: "_Buffer") -> None:
        """Adds to `grad_h`, the gradient of each state through its own y alone, what comes through the later states.

        `decay` becomes its product with `grad_h`; `leaving`, the gradient of the state that leaves the block, becomes
        that of the state that enters it.
        """
        later = leaving
        for decay_q, grad_q in zip(reversed(decay.steps), reversed(grad_h.steps), strict=True):
            later = decay_q.mul_(grad_q.add_(later))
        leaving.copy_(later)


class _Buffer:
    """Room for one block [Q, R, G, N, P], and its steps as views, made once: that costs as much as to use them."""

    def __init__(self, whole: Tensor):
        self.whole, self.steps = whole, whole.unbind()

    def first(self, count: int) -> "_Buffer":
        return self if count == len(self.steps) else _Buffer(self.whole[:count])


def _sum_states(coefficient: Tensor, h: Tensor) -> Tensor:
    """The real part of the sum over n of coefficient_n h_n: [Q, R, G, 1, P]."""
    if coefficient.dim() == 3:
        return (coefficient * h).sum(-2, keepdim=True).real
    return (coefficient.mT @ h).real


def _add_coefficient_gradient(grad: Tensor, times: slice, rows: slice, h: Tensor, channels: Tensor) -> None:
    """Adds a block's part to the gradient of B or C: h times channels [Q, R, G, 1, P], summed over what shares it."""
    if grad.dim() == 3:
        grad += (h * channels).sum((0, 1))
    else:
        grad[times, rows] = (channels.to(h.dtype) @ h.mT).mT


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
    if x.dim() != 3 or x.shape[1] == 0:
        raise ValueError(f"x must be [batch, time >= 1, channels], got {list(x.shape)}")
    batch, length, channels = x.shape
    if dt.shape != x.shape:
        raise ValueError(f"dt must have the shape of x, {list(x.shape)}, got {list(dt.shape)}")
    if A.dim() != 2 or A.shape[0] != channels:
        raise ValueError(f"A must be [channels = {channels}, states], got {list(A.shape)}")
    groups = []
    for name, t in (("B", B), ("C", C)):
        if t is None or t.shape == A.shape:
            continue
        if t.dim() != 4 or t.shape[:2] != x.shape[:2] or t.shape[3] != A.shape[1] or channels % t.shape[2]:
            raise ValueError(
                f"{name} must be [{batch}, {length}, groups, {A.shape[1]}] with groups that divide {channels} "
                f"channels, or {list(A.shape)} for all steps, got {list(t.shape)}"
            )
        groups.append(t.shape[2])
    if len(set(groups)) > 1:
        raise ValueError(f"B and C must have the same number of groups, got {groups[0]} and {groups[1]}")
    if D is not None and D.shape != (channels,):
        raise ValueError(f"D must be [channels = {channels}], got {list(D.shape)}")
    if reset is not None and (reset.shape != (batch, length) or reset.dtype != torch.bool):
        raise ValueError(f"reset must be bool [{batch}, {length}], got {reset.dtype} {list(reset.shape)}")
    if state is not None and state.shape != (batch, *A.shape):
        raise ValueError(f"state must be {[batch, *A.shape]}, got {list(state.shape)}")
    if state is not None and state.is_complex() and not any(t is not None and t.is_complex() for t in (A, B, C)):
        raise ValueError("the state is complex but A, B and C are real: make one of them complex or the state real")
