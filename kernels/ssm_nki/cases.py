"""The kernels that `python -m ssm_nki.cost` puts into its table, at the sizes of its table.

A kernel family adds a function that yields its cases, and that function's name to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ssm_nki.cumulative_sum import cumulative_sum
from ssm_nki.delta_rule import delta_rule_backward, delta_rule_forward
from ssm_nki.linear_attention import linear_attention_backward, linear_attention_forward
from ssm_nki.selective_scan import selective_scan_backward, selective_scan_forward
from ssm_nki.short_conv import short_conv_backward, short_conv_forward

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Case:
    """One row of the table, for each target.

    Args:
        kernel: name of the kernel family.
        direction: "fwd" or "bwd".
        shape: the sizes in words, as the table shows them.
        flops: floating-point operations of the products that the computation needs, whoever writes the kernel.
        build: gives the kernel and its arguments; the arrays' contents do not matter, nothing is computed.
        dtype: type of the products, "bfloat16" or "float32", whose peak the floor assumes.
    """

    kernel: str
    direction: str
    shape: str
    flops: float
    build: Callable[[], tuple[Any, tuple]]
    dtype: str = "bfloat16"


def _cumulative_sum() -> Iterator[Case]:
    steps, heads = 2048, 32
    yield Case(
        kernel="cumulative_sum",
        direction="fwd",
        shape=f"T={steps} H={heads} fp32",
        flops=float(steps * heads),
        build=lambda: (cumulative_sum, (np.zeros((steps, heads), np.float32),)),
        dtype="float32",
    )


def _delta_rule() -> Iterator[Case]:
    steps, heads, size, chunk = 2048, 16, 128, 128
    per_head = (1, steps, heads)
    wide, state = np.zeros((*per_head, size), BFLOAT16), np.zeros((1, heads, size, size), np.float32)
    strength = np.zeros(per_head, np.float32)
    kept = (
        np.zeros((*per_head, chunk), np.float32),
        np.zeros((*per_head, size), np.float32),
        np.zeros((1, steps // chunk, heads, size, size), BFLOAT16),
    )
    product = 2 * heads * steps * chunk * size  # FLOPs of one product in all chunks, whose sizes are all 128
    for decay, log_decay in (("head", strength), ("channel", np.zeros((*per_head, size), np.float32))):
        shape = f"T={steps} H={heads} K=V={size} bf16, decay per {decay}"
        forward = wide, wide, wide, strength, log_decay, state, 1.0
        backward = wide, state, wide, wide, strength, *kept, log_decay
        for keep, note in ((False, ""), (True, ", kept for bwd")):
            yield Case(
                "delta_rule", "fwd", shape + note, 7.0 * product, partial(_with, delta_rule_forward, *forward, keep)
            )
        yield Case("delta_rule", "bwd", shape, 17.0 * product, partial(_with, delta_rule_backward, *backward))


def _linear_attention() -> Iterator[Case]:
    steps, chunk = 2048, 128
    for decay, key_heads, heads, channels, values in (
        ("head", 1, 32, 128, 64),  # Mamba-2
        ("head", 16, 16, 128, 128),
        ("channel", 16, 16, 128, 128),
        ("none", 16, 16, 128, 128),
    ):
        keys = np.zeros((1, steps, key_heads, channels), BFLOAT16)
        wide = np.zeros((1, steps, heads, values), BFLOAT16)
        state = np.zeros((1, heads, channels, values), np.float32)
        gates = {"head": (1, steps, heads), "channel": (1, steps, heads, channels), "none": None}[decay]
        log_decay = None if gates is None else np.zeros(gates, np.float32)
        entering = np.zeros((1, steps // chunk, channels, heads, values), BFLOAT16)
        shape = f"T={steps} G={key_heads} H={heads} K={channels} V={values} bf16, decay per {decay}"
        shape = shape.replace("decay per none", "no decay")
        scores = 2.0 * key_heads * steps * chunk * channels  # FLOPs of a product of queries and keys in all chunks
        mixed = 2.0 * heads * steps * chunk * values  # of M with values
        through = 2.0 * heads * steps * channels * values  # of keys or queries with a state
        forward = keys, keys, wide, log_decay, state, 1.0
        backward = wide, state, keys, keys, wide, entering, log_decay
        flops = scores + mixed + 2 * through
        for keep, note in ((False, ""), (True, ", kept for bwd"))[: 2 if key_heads == 1 else 1]:
            build = partial(_with, linear_attention_forward, *forward, keep)
            yield Case("linear_attention", "fwd", shape + note, flops, build)
        flops = 3 * scores + 2 * mixed + 4 * through
        yield Case("linear_attention", "bwd", shape, flops, partial(_with, linear_attention_backward, *backward))


def _selective_scan() -> Iterator[Case]:
    steps, channels = 2048, 2048
    for dtype, word, states in ((np.float32, "fp32", 16), (BFLOAT16, "bf16", 16), (BFLOAT16, "bf16", 1)):
        x, dt = np.zeros((1, steps, channels), dtype), np.zeros((1, steps, channels), np.float32)
        A, state = np.zeros((channels, states), np.float32), np.zeros((1, channels, states), np.float32)
        shape = f"T={steps} D={channels} N={states} {word}"
        coefficients: tuple[Any, ...] = (None, None, None)  # B, C, D
        if states == 1:
            shape += ", gated RNN"
        else:
            coefficients = (
                np.zeros((1, steps, states), dtype),
                np.zeros((1, steps, states), dtype),
                np.zeros_like(A[:, 0]),
            )
        forward = partial(_with, selective_scan_forward, x, dt, A, *coefficients, state, None, states > 1)
        entering = np.zeros((1, steps // 512, channels, states), np.float32)
        backward = partial(
            _with, selective_scan_backward, x, state, x, dt, A, *coefficients, entering, None, states > 1
        )
        product = 2.0 * steps * channels * states  # FLOPs of one sum over states or channels
        kind = "float32" if word == "fp32" else "bfloat16"
        yield Case("selective_scan", "fwd", shape, product, forward, kind)
        yield Case("selective_scan", "bwd", shape, 4 * product, backward, kind)


def _short_conv() -> Iterator[Case]:
    steps, channels, taps = 2048, 2048, 4
    for dtype, word, resets in ((BFLOAT16, "bf16", False), (BFLOAT16, "bf16", True), (np.float32, "fp32", False)):
        x, weight = np.zeros((1, steps, channels), dtype), np.zeros((channels, taps), np.float32)
        reads = np.zeros((1, taps, steps), dtype) if resets else None
        forward = partial(_with, short_conv_forward, x, weight, weight[:, 0], None, reads, True)
        backward = partial(_with, short_conv_backward, x, None, x, weight, weight[:, 0], None, reads, True)
        shape = f"T={steps} D={channels} W={taps} {word}, SiLU" + (", resets" if resets else "")
        product = 2.0 * steps * channels * taps
        kind = "float32" if word == "fp32" else "bfloat16"
        yield Case("short_conv", "fwd", shape, product, forward, kind)
        yield Case("short_conv", "bwd", shape, 3 * product, backward, kind)


def _with(kernel: Any, *arguments: Any) -> tuple[Any, tuple]:
    return kernel, arguments


FAMILIES: list[Callable[[], Iterator[Case]]] = [
    _cumulative_sum,
    _delta_rule,
    _linear_attention,
    _selective_scan,
    _short_conv,
]


def all_cases() -> list[Case]:
    """All cases, family by family."""
    return [case for family in FAMILIES for case in family()]
