"""The form of the selective scan that runs, block by block; selective_scan.py defines what it computes.

A scan does one multiplication and one addition for each exponential, so memory bounds it. The [B, T, D, N] tensors
(decays, states and their gradients) therefore exist only for a block of steps at a time, in buffers that stay in the
cache, and the backward pass computes them again from the inputs and from the state that entered the block. In a block
time is the first axis: a step is then one contiguous piece and is updated in place. Forward and backward are custom
operators, so that torch.compile takes them whole and does not unroll the loop.

Shapes in a block: Q steps, R rows of the batch, G groups, N states, P = D / G channels of a group.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssm_trn.ops.contexts import full_precision, one_thread

# An infinite step size is a full decay (and, where it scales the input, a huge write). It is cut to a finite one, so
# that inf * 0 makes no NaN in a gradient.
LARGEST_STEP = 1e30


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
        before, *after = entering[:, rows].unbind() if keep else [entering[0, rows]] * (call.block_count + 1)
        for block, y_block, end in zip(call.blocks(rows), call.cut(y_view, rows), after, strict=True):
            decay, h = (buffer.first(block.step_count) for buffer in buffers)
            block.recur(before, decay, h)
            before = end.copy_(h.steps[-1])
            read = _sum_states(block.C, h.whole)  # [Q, R, G, 1, P]
            y_block.copy_(read if call.D is None else read.addcmul_(block.x, call.D))
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
    # The gradient of x begins as that of what is written; both gradients are completed after the blocks.
    grads = [torch.empty(x.shape, dtype=call.real, device=x.device) for _ in range(2)]
    grad_written, grad_dt = (call.time_first(grad) for grad in grads)
    grad_y = call.time_first(grad_y).to(call.real)
    grad_A, grad_B, grad_C = (t.new_zeros(t.shape) for t in (call.A, call.B, call.C))
    grad_state = call.states_first(grad_final).clone()  # of the state that leaves the block [B, G, N, P]
    for rows in call.rows:
        buffers = call.buffers(3, rows)
        parts = (call.cut(t, rows) for t in (grad_y, grad_written, grad_dt, grad_B, grad_C))
        blocks = list(zip(call.blocks(rows), entering[:-1, rows].unbind(), *parts, strict=True))
        for block, before, grad_y_block, grad_written_block, grad_dt_block, grad_B_block, grad_C_block in blocks[::-1]:
            decay, h, grad_h = (buffer.first(block.step_count) for buffer in buffers)
            block.recur(before, decay, h)
            _add_coefficient_gradient(grad_C_block, h.whole, grad_y_block)
            torch.mul(grad_y_block, block.C, out=grad_h.whole)
            block.recur_back(grad_state[rows], decay, grad_h)
            _add_coefficient_gradient(grad_B_block, grad_h.whole, block.written)
            grad_written_block.copy_(_sum_states(block.B, grad_h.whole))

            grad_exponent = decay.whole
            if negative:  # the derivative of 2 exp(a) - 1 is that value + 1
                grad_exponent.add_(grad_h.whole if block.kept is None else grad_h.whole * block.kept)
            grad_exponent[1:].mul_(h.whole[:-1])
            decay.steps[0].mul_(before)
            grad_A += torch.mul(grad_exponent, block.dt, out=h.whole).sum((0, 1))
            grad_dt_block.copy_(grad_exponent.mul_(call.A).sum(-2, keepdim=True).real)
    if scale_input:
        grad_dt.addcmul_(grad_written, call.x)
        grad_written.mul_(call.dt)
    grad_D = x.new_zeros(0)
    if call.D is not None:
        grad_written.addcmul_(grad_y, call.D)
        grad_D = torch.mul(grad_y, call.x, out=call.dt).sum((0, 1)).flatten()  # dt is a copy that has done its service
    grad_x, grad_dt = (grad.to(t.dtype) for grad, t in zip(grads, (x, dt), strict=True))
    grad_A, grad_B, grad_C = (call.coefficient_back(grad) for grad in (grad_A, grad_B, grad_C))
    return grad_x, grad_dt, grad_A, grad_B, grad_C, grad_D, call.channels_first(grad_state)


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
        self.real, self.negative = A.dtype.to_real(), negative
        self.x = self.time_first(x).to(self.real)
        self.dt = self.time_first(dt).to(self.real).clamp(max=LARGEST_STEP)
        self.written = self.dt * self.x if scale_input else self.x
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
        step, block = (2**14, 2**17) if x.device.type == "cpu" else (2**62, 2**24)
        row_count = min(batch, max(1, step // A.numel()))
        self.rows = [slice(start, min(start + row_count, batch)) for start in range(0, batch, row_count)]
        self.step_count = min(length, max(block // (row_count * A.numel()), min(A.shape[1] // 2, 32), 1))
        self.block_count = -(-length // self.step_count)

    def blocks(self, rows: slice) -> list["_Block"]:
        inputs = [self.cut(t, rows) for t in (self.x, self.dt, self.written, self.B, self.C)]
        kept = [None] * self.block_count if self.kept is None else self.cut(self.kept, rows)
        return [_Block(self, *parts) for parts in zip(*inputs, kept, strict=True)]

    def cut(self, t: Tensor, rows: slice) -> Sequence[Tensor]:
        """The blocks of t [T, B, ...] in these rows; what holds for all steps, [G, N, P], is the same in each."""
        return t[:, rows].split(self.step_count) if t.dim() == 5 else [t] * self.block_count

    def buffers(self, count: int, rows: slice) -> list["_Buffer"]:
        shape = (self.step_count, rows.stop - rows.start, *self.A.shape)  # [Q, R, G, N, P]
        return [_Buffer(self.A.new_empty(shape)) for _ in range(count)]

    def states_between(self, keep: bool) -> Tensor:
        count = self.block_count + 1 if keep else 1
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

    def __init__(self, call: _Call, x: Tensor, dt: Tensor, written: Tensor, B: Tensor, C: Tensor, kept: Tensor | None):
        self.A_log2, self.negative, self.step_count = call.A_log2, call.negative, x.shape[0]
        self.x, self.dt, self.written, self.B, self.C, self.kept = x, dt, written, B, C, kept

    def recur(self, entering: Tensor, decay: "_Buffer", h: "_Buffer") -> None:
        """Fills `decay` with exp(dt A) and `h` with the states, from the state that enters the block [R, G, N, P]."""
        torch.mul(self.dt, self.A_log2, out=decay.whole).exp2_()
        if self.negative:
            decay.whole.mul_(2).sub_(1)
        if self.kept is not None:
            decay.whole.mul_(self.kept)
        torch.mul(self.written, self.B, out=h.whole)
        _add_in_turn(h.steps, decay.steps, (entering, *h.steps[:-1]))

    def recur_back(self, leaving: Tensor, decay: "_Buffer", grad_h: "_Buffer") -> None:
        """Adds to `grad_h`, the gradient of each state through its own y alone, what comes through the later states.

        `decay` becomes its product with `grad_h`; `leaving`, the gradient of the state that leaves the block, becomes
        that of the state that enters it.
        """
        grads = grad_h.steps[::-1]
        grads[0].add_(leaving)
        _add_in_turn(grads[1:], decay.steps[:0:-1], grads[:-1])
        decay.whole.mul_(grad_h.whole)
        leaving.copy_(decay.steps[0])


class _Buffer:
    """Room for one block [Q, R, G, N, P], and its steps as views, made once: that costs as much as to use them."""

    def __init__(self, whole: Tensor):
        self.whole, self.steps = whole, whole.unbind()

    def first(self, count: int) -> "_Buffer":
        return self if count == len(self.steps) else _Buffer(self.whole[:count])


def _add_in_turn(targets: tuple[Tensor, ...], factors: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
    """targets[i] += factors[i] * others[i], one after the other: `others` may hold earlier targets."""
    if targets and targets[0].device.type == "cpu":  # in this order, too, and without a call from Python for each
        torch._foreach_addcmul_(targets, factors, others)
        return
    for target, factor, other in zip(targets, factors, others, strict=True):
        target.addcmul_(factor, other)


def _sum_states(coefficient: Tensor, h: Tensor) -> Tensor:
    """The real part of the sum over n of coefficient_n h_n: [Q, R, G, 1, P]."""
    if coefficient.dim() == 3:
        return (coefficient * h).sum(-2, keepdim=True).real
    return (coefficient.mT @ h).real


def _add_coefficient_gradient(grad: Tensor, h: Tensor, channels: Tensor) -> None:
    """Adds a block's part to its gradient of B or C: h times channels [Q, R, G, 1, P], summed over what shares it."""
    if grad.dim() == 3:
        grad += (h * channels).sum((0, 1))
    else:
        grad.mT.copy_(channels.to(h.dtype) @ h.mT)
