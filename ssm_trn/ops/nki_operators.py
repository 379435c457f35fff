"""The kernels of ssm_nki as operators of PyTorch, with the arguments that the kernels take.

Each op has two custom operators, the forward and the backward kernel, so that autograd, torch.compile and the XLA graph
take them whole. Their results may not be None: what belongs to an input that is None is empty.

A kernel gets one row of the batch at a time: it has no loops, so that its length, and the time to compile it, grows
with what it is given; and one compiled kernel serves every batch size.
"""

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

CHUNK = 128  # steps of a chunk: the state that enters each is kept for the backward pass
_operator = partial(torch.library.custom_op, mutates_args=(), device_types=("cpu", "xla"))


def _run(
    kernel: str,
    inputs: Sequence,
    options: Mapping[str, float | bool],
    weights: Sequence[int] = (),
    sums: Sequence[int] = (),
) -> Any:
    """The results of a kernel for all rows of the batch, a tuple.

    Args:
        kernel: its name, FAMILY_forward in the module ssm_nki.FAMILY, or FAMILY_backward in a module of that name.
        inputs: tensors or None, what it takes in HBM; the first has a batch axis.
        options: compile-time values.
        weights: the positions of inputs without a batch axis.
        sums: the positions of results without a batch axis, gradients of weights, which are added over the rows.
    """
    function = getattr(importlib.import_module(f"ssm_nki.{kernel.removesuffix('_forward')}"), kernel)
    simulated = inputs[0].device.type == "cpu"
    results = []
    for row in range(len(inputs[0])):
        of_row = [x if x is None or i in weights else x[row : row + 1] for i, x in enumerate(inputs)]
        found = function(*(map(array_of, of_row) if simulated else of_row), **options)
        found = found if isinstance(found, tuple) else (found,)
        results.append(list(map(tensor_of, found)) if simulated else found)
    columns = zip(*results, strict=True)
    return tuple(torch.stack(column).sum(0) if i in sums else torch.cat(column) for i, column in enumerate(columns))


def array_of(x: Tensor | None) -> np.ndarray | None:
    """The same as an array of NumPy, which has bfloat16 from ml_dtypes."""
    if x is None:
        return None
    x = x.detach().contiguous()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def tensor_of(array: np.ndarray) -> Tensor:
    if array.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)


def _empty_like(first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """New tensors of these shapes and types, which hold nothing."""
    return tuple(first.new_empty(0) if x is None else x.new_empty(x.shape) for x in (first, *others))


def _with_empty(grads: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> Any:
    """The gradients of all inputs, from those of the inputs that are not None, in their order."""
    remaining = iter(grads)
    return tuple(grads[0].new_empty(0) if x is None else next(remaining) for x in inputs)


def _without_empty(grads: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else grad for x, grad in zip(inputs, grads, strict=True))


def _add_groups(grad: Tensor, key_heads: int) -> Tensor:
    """The sum over neighbouring heads that share a key head, [B, T, J, K] -> [B, T, G, K]."""
    return grad if grad.shape[2] == key_heads else grad.unflatten(2, (key_heads, -1)).sum(3)


def _chunks(x: Tensor, keep: bool) -> int:
    """How many chunks of x [B, T, ...] something is kept for."""
    return -(-x.shape[1] // CHUNK) if keep else 0


def initial_state(state: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """`state`, or one of zeros; in float32."""
    if state is None:
        return v.new_zeros(len(v), v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    return state.float()


@_operator("ssm_trn::nki_linear_attention")
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, scale: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state and, if `keep`, the states that enter the chunks."""
    results = _run("linear_attention_forward", (q, k, v, log_decay, state), {"scale": scale, "keep": keep})
    return results if keep else (*results, _entering(q, v, keep))


@linear_attention.register_fake
def _(q, k, v, log_decay, state, scale, keep):
    return *_empty_like(v, state), _entering(q, v, keep)


def _entering(q: Tensor, v: Tensor, keep: bool) -> Tensor:
    return v.new_empty(len(v), _chunks(v, keep), q.shape[3], *v.shape[2:])  # [B, chunks, K, H, V]


@_operator("ssm_trn::nki_linear_attention_backward")
def linear_attention_backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    entering: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, log_decay and the state."""
    inputs = grad_out, grad_final, q, k, v, entering, log_decay
    grad_q, grad_k, *grads = _run("linear_attention_backward", inputs, {"scale": scale})
    grads = [_add_groups(grad_q, q.shape[2]), _add_groups(grad_k, q.shape[2]), *grads]
    return _with_empty(grads, (q, k, v, log_decay, grad_final))


@linear_attention_backward.register_fake
def _(grad_out, grad_final, q, k, v, log_decay, entering, scale):
    return _empty_like(q, k, v, log_decay, grad_final)


def _keep_linear_attention(ctx, inputs, output) -> None:
    q, k, v, log_decay, _, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, log_decay, output[2])
    ctx.set_materialize_grads(False)  # what is kept gets no gradient, not even zeros


def _linear_attention_grads(ctx, grad_out: Tensor | None, grad_final: Tensor | None, _) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, entering = ctx.saved_tensors
    grad_out = torch.zeros_like(v) if grad_out is None else grad_out
    grad_final = initial_state(grad_final, q, v)
    grads = linear_attention_backward(grad_out, grad_final, q, k, v, log_decay, entering, ctx.scale)
    return *_without_empty(grads, (q, k, v, log_decay, grad_final)), None, None


linear_attention.register_autograd(_linear_attention_grads, setup_context=_keep_linear_attention)


@_operator("ssm_trn::nki_delta_rule")
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor, scale: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state and, if `keep`, the inverse and the errors of each chunk and the states that enter them."""
    results = _run("delta_rule_forward", (q, k, v, beta, log_decay, state), {"scale": scale, "keep": keep})
    return results if keep else (*results, *_delta_rule_kept(v, state, keep))


@delta_rule.register_fake
def _(q, k, v, beta, log_decay, state, scale, keep):
    return *_empty_like(v, state), *_delta_rule_kept(v, state, keep)


def _delta_rule_kept(v: Tensor, state: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, values = v.shape if keep else (len(v), 0, 0, 0)
    inverse = state.new_empty(batch, length, heads, min(length, CHUNK))
    entering = v.new_empty(batch, _chunks(v, keep), *state.shape[1:])
    return inverse, state.new_empty(batch, length, heads, values), entering


@_operator("ssm_trn::nki_delta_rule_backward")
def delta_rule_backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    inverse: Tensor,
    errors: Tensor,
    entering: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, beta, log_decay and the state."""
    inputs = grad_out, grad_final, q, k, beta, inverse, errors, entering, log_decay
    grad_q, grad_k, *grads = _run("delta_rule_backward", inputs, {"scale": scale})
    grads = [_add_groups(grad_q, q.shape[2]), _add_groups(grad_k, q.shape[2]), *grads]
    return _with_empty(grads, (q, k, grad_out, beta, log_decay, grad_final))


@delta_rule_backward.register_fake
def _(grad_out, grad_final, q, k, beta, log_decay, inverse, errors, entering, scale):
    return _empty_like(q, k, grad_out, beta, log_decay, grad_final)


def _keep_delta_rule(ctx, inputs, output) -> None:
    q, k, _, beta, log_decay, _, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, beta, log_decay, *output[2:])
    ctx.set_materialize_grads(False)


def _delta_rule_grads(ctx, grad_out: Tensor | None, grad_final: Tensor | None, *_) -> tuple[Tensor | None, ...]:
    q, k, beta, log_decay, _, errors, _ = saved = ctx.saved_tensors
    grad_out = torch.zeros_like(errors, dtype=q.dtype) if grad_out is None else grad_out
    grad_final = initial_state(grad_final, q, errors)
    grads = delta_rule_backward(grad_out, grad_final, *saved, ctx.scale)
    return *_without_empty(grads, (q, k, grad_out, beta, log_decay, grad_final)), None, None


delta_rule.register_autograd(_delta_rule_grads, setup_context=_keep_delta_rule)


@_operator("ssm_trn::nki_selective_scan")
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
    scale_input: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state and, if `keep`, the states that enter the tiles of time."""
    options = {"scale_input": scale_input, "keep": keep}
    results = _run("selective_scan_forward", (x, dt, A, B, C, D, state, reset), options, weights=(2, 5))
    return results if keep else (*results, _entering_tiles(x, state, keep))


@selective_scan.register_fake
def _(x, dt, A, B, C, D, state, reset, scale_input, keep):
    return *_empty_like(x, state), _entering_tiles(x, state, keep)


def _entering_tiles(x: Tensor, state: Tensor, keep: bool) -> Tensor:
    from ssm_nki import layouts, selective_scan_inputs

    blocks = selective_scan_inputs.blocks_for(state.shape[-1])
    count = len(layouts.time_tiles(x.shape[1], blocks)) if keep else 0
    return state.new_empty(len(x), count, *state.shape[1:])


@_operator("ssm_trn::nki_selective_scan_backward")
def selective_scan_backward(
    grad_y: Tensor,
    grad_final: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    entering: Tensor,
    reset: Tensor | None,
    scale_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, dt, A, the state, B, C and D."""
    inputs = grad_y, grad_final, x, dt, A, B, C, D, entering, reset
    sums = (2,) if D is None else (2, 4 + (B is not None) + (C is not None))
    grads = _run("selective_scan_backward", inputs, {"scale_input": scale_input}, weights=(4, 7), sums=sums)
    return _with_empty(grads, (x, dt, A, grad_final, B, C, D))


@selective_scan_backward.register_fake
def _(grad_y, grad_final, x, dt, A, B, C, D, entering, reset, scale_input):
    return _empty_like(x, dt, A, grad_final, B, C, D)


def _keep_selective_scan(ctx, inputs, output) -> None:
    *tensors, _, reset, ctx.scale_input, _ = inputs
    ctx.save_for_backward(*tensors, output[2], reset)
    ctx.set_materialize_grads(False)


def _selective_scan_grads(ctx, grad_y: Tensor | None, grad_final: Tensor | None, _) -> tuple[Tensor | None, ...]:
    x, _, A, *coefficients, _, _ = saved = ctx.saved_tensors
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    grad_final = A.new_zeros(len(x), *A.shape) if grad_final is None else grad_final
    grads = selective_scan_backward(grad_y, grad_final, *saved, ctx.scale_input)
    return *grads[:3], *_without_empty(grads[4:], coefficients), grads[3], None, None, None


selective_scan.register_autograd(_selective_scan_grads, setup_context=_keep_selective_scan)


@_operator("ssm_trn::nki_short_conv")
def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, reads: Tensor | None, silu: bool
) -> Tensor:
    """y; `reads` [B, W, T]: 0 where a tap would read across a reset, else 1."""
    return _run("short_conv_forward", (x, weight, bias, state, reads), {"silu": silu}, weights=(1, 2))[0]


@short_conv.register_fake
def _(x, weight, bias, state, reads, silu):
    return x.new_empty(x.shape)


@_operator("ssm_trn::nki_short_conv_backward")
def short_conv_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    reads: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, the state and bias."""
    inputs = grad_y, None, x, weight, bias, state, reads
    sums = 1, 2 if state is None else 3
    grads = _run("short_conv_backward", inputs, {"silu": silu}, weights=(3, 4), sums=sums)
    return _with_empty(grads, (x, weight, state, bias))


@short_conv_backward.register_fake
def _(grad_y, x, weight, bias, state, reads, silu):
    return _empty_like(x, weight, state, bias)


def _keep_short_conv(ctx, inputs, output) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _short_conv_grads(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, state, reads = ctx.saved_tensors
    grads = short_conv_backward(grad_y, x, weight, bias, state, reads, ctx.silu)
    grad_x, grad_weight, grad_state, grad_bias = _without_empty(grads, (x, weight, state, bias))
    return grad_x, grad_weight, grad_bias, grad_state, None, None


short_conv.register_autograd(_short_conv_grads, setup_context=_keep_short_conv)
