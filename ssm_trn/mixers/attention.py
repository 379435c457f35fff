"""Softmax attention with rotary positions, over all earlier tokens or a sliding window of them.

    q_t, k_t, v_t = W_q x_t, W_k x_t, W_v x_t;   q_t, k_t rotated by angle position * theta^(-2i/R)
    y_t = W_out (sigmoid(W_g x_t) * sum_s softmax_s(q_t^T k_s / sqrt(K)) v_s)       the gate where asked for

Vaswani et al. 2017 (arXiv:1706.03762). Rotary positions: Su et al. 2021 (arXiv:2104.09864), halves rotated against each
other as in Llama. Grouped heads: Ainslie et al. 2023 (arXiv:2305.13245). QK-norm: Henry et al. 2020 (arXiv:2010.04245).
Output gate: Qiu et al. 2025 (arXiv:2505.06708).

K  head_dim, R  rotated part of it
H  n_heads, Hk  n_kv_heads (H is a multiple of Hk)
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import RMSNorm, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, heads_of, require_positive
from ssm_trn.ops.attention import empty_cache, next_positions


def rotate(x: Tensor, positions: Tensor, theta: float, rotary_dim: int | None = None) -> Tensor:
    """Rotary position embedding of x [B, T, H, K] at positions [B, T] or [B, 1], computed in float32 or better.

    With rotary_dim R, only the first R channels of each head are rotated.
    """
    half = (rotary_dim or x.shape[-1]) // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=widened(x).dtype) / half)
    angles = positions[:, :, None, None] * frequencies  # [B, T, 1, R/2]
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x.tensor_split([half, 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


@register("attention")
class Attention(Mixer):
    """Options:
    n_heads: query heads; by default as many of width 64 as d_model holds.
    n_kv_heads: key and value heads, a divisor of n_heads; by default as many.
    head_dim: width of a head; d_model / n_heads by default.
    window: number of tokens that a step sees, itself included; None: all.
    rope_theta: base of the rotary frequencies; None: no positions.
    rotary_fraction: R / K, the part of each head that is rotated; the rest carries no position.
    qk_norm: RMS norm of each query and key head before the rotation.
    qk_norm_across_heads: that norm runs over all heads of a token at once, as in OLMo 2.
    norm_eps: epsilon of these norms.
    output_gate: sigmoid gate on the output of each head.
    qkv_bias: whether the maps to queries, keys and values (and gates) have biases.
    out_bias: whether the output map has one.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        rope_theta: float | None = 10000.0,
        rotary_fraction: float = 1.0,
        qk_norm: bool = False,
        qk_norm_across_heads: bool = False,
        norm_eps: float = 1e-5,
        output_gate: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ):
        super().__init__()
        require_positive(n_kv_heads=n_kv_heads, window=window, rope_theta=rope_theta, rotary_fraction=rotary_fraction)
        self.n_heads, self.head_dim = heads_of(d_model, n_heads, head_dim)
        self.n_kv_heads = n_kv_heads or self.n_heads
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need an even one, or rope_theta: null")
        self.rotary_dim = int(rotary_fraction * self.head_dim)
        if rope_theta is not None and (rotary_fraction > 1 or self.rotary_dim % 2 or self.rotary_dim == 0):
            raise ValueError(
                f"rotary_fraction {rotary_fraction} rotates {self.rotary_dim} of {self.head_dim} channels (head_dim): "
                "it must be at most 1 and give an even number above 0"
            )
        if qk_norm_across_heads and not qk_norm:
            raise ValueError("qk_norm_across_heads says how qk_norm runs: set qk_norm as well")
        self.window, self.rope_theta, self.qk_norm_across_heads = window, rope_theta, qk_norm_across_heads
        query_width, key_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.splits = [query_width, key_width, key_width] + ([query_width] if output_gate else [])
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=qkv_bias)
        normed_widths = [query_width, key_width] if qk_norm_across_heads else [self.head_dim] * 2
        self.q_norm, self.k_norm = (RMSNorm(width, norm_eps) if qk_norm else None for width in normed_widths)
        self.out_proj = nn.Linear(query_width, d_model, bias=out_bias)

    def forward(self, x, state=None, mask=None, reset=None):
        q, k, v, *gate = self.in_proj(x).split_with_sizes(self.splits, dim=-1)
        if self.qk_norm_across_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (rearrange(part, "b t (h k) -> b t h k", k=self.head_dim) for part in (q, k, v))
        if self.q_norm is not None and not self.qk_norm_across_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            positions = next_positions(state, mask, x.shape[0], x.shape[1], x.device)
            q, k = (rotate(part, positions, self.rope_theta, self.rotary_dim) for part in (q, k))
        out, state = ops.attention(q, k, v, window=self.window, mask=mask, reset=reset, cache=state)
        out = rearrange(out, "b t h v -> b t (h v)")
        return self.out_proj(out * torch.sigmoid(gate[0]) if gate else out), state

    def init_state(self, batch, max_length, device, dtype):
        slots = max_length + 1 if self.window is None else self.window  # see ops/attention.py on the spare slot
        shape = (self.n_kv_heads, self.head_dim)
        return empty_cache(batch, slots, shape, shape, device, dtype)

    def state_size(self, context_length: int) -> int:
        tokens = context_length if self.window is None else min(self.window, context_length)
        return 2 * tokens * self.n_kv_heads * self.head_dim
