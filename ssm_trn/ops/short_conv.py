"""The short causal convolution before a scan: one filter per channel, W taps wide (usually 4).

    z_t = bias + sum over lag < W of weight[W - 1 - lag] x_{t - lag}        y_t = z_t or silu(z_t)

The last tap belongs to the current step, as in `torch.nn.Conv1d` with its input padded on the left. The state is the
tail: the last W - 1 inputs, oldest first.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn.ops.backends import find_kernel, select
from ssm_trn.ops.contexts import cast, one_thread
from ssm_trn.ops.masking import delete_masked
from ssm_trn.ops.packing import at_last_reset


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    state: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves every channel with its own causal filter, for any number of steps.

    Args:
        x: input [B, T, D].
        weight: filters [D, W]; the last tap weighs the current step.
        bias: [D], or None.
        mask: bool [B, T], True at real tokens. The taps and the tail skip masked steps, wherever they stand, as if they
            were deleted; the output there is finite and means nothing.
        reset: bool [B, T]; no tap reaches from such a step or a later one to before it.
        state: the W - 1 inputs before the first step [B, W - 1, D], or None for zeros.
        activation: None or "silu".

    Returns:
        y [B, T, D] and the next state [B, W - 1, D], both in the dtype of x (the sums are float32, or float64 where x
        is). Inputs from before the last reset are zeros in the state.

    Raises:
        ValueError: if the shapes do not fit together, or for another activation.
    """
    _check(x, weight, bias, mask, reset, state, activation)
    (batch, length, channels), taps = x.shape, weight.shape[1]
    if mask is not None:
        x, reset, place = delete_masked(x, reset, mask)
    tail = x.new_zeros(batch, taps - 1, channels) if state is None else cast(state, x.dtype)
    history = torch.cat([tail, x], 1)  # [B, W - 1 + T, D]
    age = None if reset is None else _steps_since_reset(reset)
    dtype = torch.promote_types(x.dtype, torch.float32)
    filters = cast(weight, dtype).t()  # [W, D]
    silu = activation == "silu"
    arguments = {"x": x, "weight": weight, "bias": bias, "state": tail, "age": age, "silu": silu}
    forms: dict[str, Callable] = {"reference": reference, "torch": blocked, "parallel": parallel}
    form = select("short_conv", forms, x.device)
    if length == 1:  # a decode step needs no blocks
        y = single(history, filters, bias, age, silu)
    elif kernel := find_kernel("short_conv", arguments):
        y = kernel(**arguments)
    else:
        bias = filters.new_zeros(channels) if bias is None else bias.to(dtype)
        y = form(history, filters.contiguous(), bias, age, silu)
    if mask is not None:
        y = y.gather(1, place[..., None].expand_as(y))
    return y, _last_inputs(history, taps - 1, mask, age)


def reference(history: Tensor, weight: Tensor, bias: Tensor, age: Tensor | None, silu: bool) -> Tensor:
    """The definition as a plain loop over steps.

    Args:
        history: the tail and the inputs [B, W - 1 + T, D].
        weight, bias: [W, D] and [D], in the dtype of the sums.
        age: steps since the last reset [B, T]; a tap that lags by more reads 0. None without resets.
        silu: whether to end with SiLU.
    """
    taps, inputs, outputs = len(weight), history.to(weight.dtype).unbind(1), []
    for t in range(len(inputs) - taps + 1):
        window = torch.stack(inputs[t : t + taps], 1)  # [B, W, D]
        outputs.append(_step(window, weight, bias, None if age is None else age[:, t]))
    z = torch.cat(outputs, 1)  # [B, T, D]
    return (F.silu(z) if silu else z).to(history.dtype)


def _step(window: Tensor, weight: Tensor, bias: Tensor | None, age: Tensor | None) -> Tensor:
    """The filter at one step: window [B, W, D], age [B] -> [B, 1, D]."""
    if age is not None:
        lags = torch.arange(len(weight) - 1, -1, -1, device=window.device)
        window = torch.where((lags <= age[:, None])[..., None], window, 0)
    z = (window * weight).sum(1, keepdim=True)
    return z if bias is None else z + bias


def single(history: Tensor, weight: Tensor, bias: Tensor | None, age: Tensor | None, silu: bool) -> Tensor:
    """`reference` for T = 1, without the loop around the step."""
    z = _step(cast(history, weight.dtype), weight, bias, None if age is None else age[:, 0])
    return cast(F.silu(z) if silu else z, history.dtype)


def parallel(history: Tensor, weight: Tensor, bias: Tensor, age: Tensor | None, silu: bool) -> Tensor:
    """The same as `reference`, tap by tap for all steps at once, with ordinary operators alone."""
    everything = slice(None), slice(0, history.shape[1] - len(weight) + 1)
    z = _filter(_taps(everything, history, weight.unbind(), age), weight.unbind(), bias)
    return (F.silu(z) if silu else z).to(history.dtype)


# The form that runs: for each tap one multiplication and addition over many steps at once. Time stays before channels,
# as everywhere else (F.conv1d needs two transposes), and blocks are small enough to stay in the cache from tap to tap.
# Forward and backward are custom operators: the backward pass keeps the inputs alone and computes z again.


@torch.library.custom_op("ssm_trn::short_conv", mutates_args=())
@one_thread()
def blocked(history: Tensor, weight: Tensor, bias: Tensor, age: Tensor | None, silu: bool) -> Tensor:
    """The same as `reference`, block by block and tap by tap."""
    y, weights = _new_output(history, weight), weight.unbind()
    for block in _blocks(y):
        z = _filter(_taps(block, history, weights, age), weights, bias)
        y[block] = F.silu(z, inplace=True) if silu else z
    return y


@blocked.register_fake
def _(history, weight, bias, age, silu):
    return _new_output(history, weight)


@torch.library.custom_op("ssm_trn::short_conv_backward", mutates_args=())
@one_thread()
def _blocked_backward(
    grad_y: Tensor, history: Tensor, weight: Tensor, bias: Tensor, age: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_history, weights = torch.empty_like(history, dtype=weight.dtype), weight.unbind()
    grad_history[:, : len(weights) - 1] = 0
    grad_weight, grad_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for rows, times in _blocks(grad_y):
        taps = _taps((rows, times), history, weights, age)
        grad_z = grad_y[rows, times].to(weight.dtype)  # [R, Q, D]
        if silu:
            grad_z = torch.ops.aten.silu_backward(grad_z, _filter(taps, weights, bias))
        grad_bias += grad_z.sum((0, 1))
        for tap, (x, valid) in reversed(list(enumerate(taps))):
            grad_tap = grad_z if valid is None else grad_z * valid
            grad_x = grad_history[rows, times.start + tap : times.stop + tap]
            if tap == len(taps) - 1:  # the one that reads what no earlier block has read
                torch.mul(grad_tap, weights[tap], out=grad_x)
            else:
                grad_x.addcmul_(grad_tap, weights[tap])
            grad_weight[tap] += (grad_tap * x).sum((0, 1))
    return grad_history.to(history.dtype), grad_weight, grad_bias


@_blocked_backward.register_fake
def _(grad_y, history, weight, bias, age, silu):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (history, weight, bias))


def _keep_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_blocked_backward(grad_y, *ctx.saved_tensors, ctx.silu), None, None


blocked.register_autograd(_backward, setup_context=_keep_for_backward)


def _new_output(history: Tensor, weight: Tensor) -> Tensor:
    batch, length, channels = history.shape
    return history.new_empty(batch, length - len(weight) + 1, channels)  # [B, T, D]


def _blocks(y: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cuts [B, T, D] into blocks of rows and steps that fit the cache of a CPU; elsewhere it is one block."""
    batch, length, channels = y.shape
    size = 2**16 if y.device.type == "cpu" else y.numel()
    row_count = max(1, size // (length * channels))
    step_count = max(1, size // (row_count * channels))
    for row in range(0, batch, row_count):
        for step in range(0, length, step_count):
            yield slice(row, row + row_count), slice(step, min(step + step_count, length))


def _taps(
    block: tuple[slice, slice], history: Tensor, weights: Sequence[Tensor], age: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """For each tap, oldest first: what it reads in the block [R, Q, D], and 1 where it does not read across a reset and
    0 where it does [R, Q, 1] (None without resets)."""
    rows, times = block
    window = history[rows, times.start : times.stop + len(weights) - 1].to(weights[0].dtype)  # [R, Q + W - 1, D]
    steps, taps = times.stop - times.start, []
    for tap, weight in enumerate(weights):
        lag = len(weights) - 1 - tap
        valid = None if age is None or lag == 0 else (age[block] >= lag)[..., None].to(weight.dtype)
        taps.append((window[:, tap : tap + steps], valid))
    return taps


def _filter(taps: list[tuple[Tensor, Tensor | None]], weights: Sequence[Tensor], bias: Tensor) -> Tensor:
    """z of a block [R, Q, D]."""
    inputs = [x if valid is None else x * valid for x, valid in taps]
    z = torch.addcmul(bias, inputs[0], weights[0])
    for x, weight in zip(inputs[1:], weights[1:], strict=True):
        z.addcmul_(x, weight)
    return z


def _steps_since_reset(reset: Tensor) -> Tensor:
    """bool [B, T] -> int32 [B, T]: 0 at a reset, and as good as infinite before the first one."""
    steps = torch.arange(reset.shape[1], device=reset.device, dtype=torch.int32)
    return steps - at_last_reset(reset, steps, -(2**30))


def _last_inputs(history: Tensor, count: int, mask: Tensor | None, age: Tensor | None) -> Tensor:
    """The last real inputs [B, count, D], 0 where they are from before the last reset.

    With a mask, the real steps stand before the masked ones in `history` and `age`.
    """
    first = history.shape[1] - count
    masked = 0 if mask is None else (~mask).sum(1, keepdim=True)  # [B, 1]
    if mask is None:
        tail = history[:, first:].clone()  # a view would keep the history alive, and has strides of its own
    else:
        index = torch.arange(first, first + count, device=history.device) - masked  # [B, count]
        tail = history.gather(1, index[..., None].expand(-1, -1, history.shape[2]))
    if age is not None:
        lags = torch.arange(count - 1, -1, -1, device=history.device)
        tail = torch.where((lags <= age[:, -1:] - masked)[..., None], tail, 0)
    return tail


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    reset: Tensor | None,
    state: Tensor | None,
    activation: str | None,
) -> None:
    if x.dim() != 3 or x.shape[1] == 0:
        raise ValueError(f"x must be [batch, time >= 1, channels], got {list(x.shape)}")
    batch, length, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise ValueError(f"weight must be [channels = {channels}, taps >= 1], got {list(weight.shape)}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias must be [channels = {channels}], got {list(bias.shape)}")
    for name, t in (("mask", mask), ("reset", reset)):
        if t is not None and (t.shape != (batch, length) or t.dtype != torch.bool):
            raise ValueError(f"{name} must be bool [{batch}, {length}], got {t.dtype} {list(t.shape)}")
    if state is not None and state.shape != (batch, weight.shape[1] - 1, channels):
        raise ValueError(f"state must be {[batch, weight.shape[1] - 1, channels]}, got {list(state.shape)}")
    if activation not in (None, "silu"):
        raise ValueError(f"unknown activation '{activation}': use None or 'silu'")
