"""Floating-point operations of a model, counted on the real module with shapes alone.

A multiplication and an addition are two operations. Matrix products are counted as they are; the recurrences as the
loops that define them, whatever chunked form computes them; long convolutions as the Fourier transforms that compute
them; attention for the pairs of steps that see each other; element-wise work between these not at all.
"""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from ssm_trn import ops  # noqa: F401  (defines the operators below)
from ssm_trn.config import ModelConfig
from ssm_trn.mixers.attention import Attention
from ssm_trn.model import LanguageModel
from ssm_trn.ops.long_conv import levels_of


def flops_per_token(config: ModelConfig, context_length: int) -> float:
    """Operations of a forward pass over `context_length` tokens, per token; a training step takes three times that."""
    if context_length < 2:
        raise ValueError(f"context_length is {context_length}; it must be at least 2")
    model = LanguageModel.without_memory(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, context_length, dtype=torch.int64, device="meta"))
    unseen = sum(_unseen(block.mixer, context_length) for block in model.blocks if isinstance(block.mixer, Attention))
    return (counter.get_total_flops() - unseen) / context_length


def _unseen(mixer: Attention, length: int) -> int:
    """What the dense products of scores and values spend on pairs that do not see each other."""
    window = min(mixer.window or length, length)
    seen = window * (window + 1) // 2 + (length - window) * window
    return 4 * mixer.n_heads * mixer.head_dim * (length**2 - seen)


@register_flop_formula(torch.ops.ssm_trn.linear_attention)
def _linear_attention(q, k, v, *args, **kwargs) -> int:
    batch, length, heads, values = v
    return batch * length * heads * q[-1] * values * 5  # decay 1, write 2, read 2


@register_flop_formula(torch.ops.ssm_trn.delta_rule)
def _delta_rule(q, r, w, log_decay, y, beta, state, size, scale, decay_first, *args, **kwargs) -> int:
    batch, length, heads, values = y
    entries = batch * length * heads * q[-1] * values
    if decay_first:
        return entries * 7  # decay 1, read what the key holds 2, write 2, read 2
    return entries // 2 * 9  # `erase`, where two steps are a token: decay 1, read 2, erase 2, write 2, read 2


@register_flop_formula(torch.ops.ssm_trn.selective_scan)
def _selective_scan(x, dt, A, *args, **kwargs) -> int:
    batch, length, channels = x
    return batch * length * channels * (A[-1] * 7 + 3)  # for each state: decay 2, write 3, read 2; skip and input 3


@register_flop_formula(torch.ops.ssm_trn.short_conv)
def _short_conv(history, weight, *args, **kwargs) -> int:
    batch, padded, channels = history
    taps = weight[0]
    return batch * (padded - taps + 1) * channels * taps * 2


@register_flop_formula(torch.ops.ssm_trn.long_conv)
def _long_conv(history, kernel, *args, **kwargs) -> int:
    """The lags that are not near; the others run as a short convolution."""
    (batch, length, channels), total = history, 0.0
    for level in levels_of(length):
        blocks = batch * level.blocks
        transform = 2.5 * level.size * math.log2(level.size)  # of real numbers; one for the kernel
        total += (2 * blocks + 1) * transform + blocks * 6 * (level.half + 1)
    return round(channels * total)
