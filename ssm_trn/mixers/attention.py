"""Softmax attention with rotary positions, over all earlier tokens or a sliding window of them.

    q_t, k_t, v_t = W_q x_t, W_k x_t, W_v x_t;   q_t, k_t rotated by angle position * theta^(-2i/K)
    y_t = W_out  sum_s softmax_s(q_t^T k_s / sqrt(K)) v_s

Vaswani et al. 2017 (arXiv:1706.03762). Rotary positions: Su et al. 2021 (arXiv:2104.09864), halves rotated against each
other as in Llama. Grouped heads: Ainslie et al. 2023 (arXiv:2305.13245). QK-norm: Henry et al. 2020 (arXiv:2010.04245).

K  head_dim
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


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of x [B, T, H, K] at positions [B, T] or [B, 1], computed in float32 or better."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=widened(x).dtype) / half)
    angles = positions[:, :, None, None] * frequencies  # [B, T, 1, K/2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@register("attention")
class Attention(Mixer):
    """Options:
    n_heads: query heads; by default as many of width 64 as d_model holds.
    n_kv_heads: key and value heads, a divisor of n_heads; by default as many.
    head_dim: width of a head; d_model / n_heads by default.
    window: number of tokens that a step sees, itself included; None: all.
    rope_theta: base of the rotary frequencies; None: no positions.
    qk_norm: RMS norm of each query and key head before the rotation.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        rope_theta: float | None = 10000.0,
        qk_norm: bool = False,
    ):
        super().__init__()
        require_positive(n_kv_heads=n_kv_heads, window=window, rope_theta=rope_theta)
        self.n_heads, self.head_dim = heads_of(d_model, n_heads, head_dim)
        self.n_kv_heads = n_kv_heads or self.n_heads
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need an even one, or rope_theta: null")
        self.window, self.rope_theta = window, rope_theta
        query_width, key_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.splits = [query_width, key_width, key_width]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.out_proj = nn.Linear(query_width, d_model, bias=False)

    def forward(self, x, state=None, mask=None, reset=None):
        q, k, v = (
            rearrange(part, "b t (h k) -> b t h k", k=self.head_dim)
            for part in self.in_proj(x).split(self.splits, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            positions = next_positions(state, mask, x.shape[0], x.shape[1], x.device)
            q, k = rotate(q, positions, self.rope_theta), rotate(k, positions, self.rope_theta)
        out, state = ops.attention(q, k, v, window=self.window, mask=mask, reset=reset, cache=state)
        return self.out_proj(rearrange(out, "b t h v -> b t (h v)")), state

    def init_state(self, batch, max_length, device, dtype):
        slots = max_length + 1 if self.window is None else self.window  # see ops/attention.py on the spare slot
        shape = (self.n_kv_heads, self.head_dim)
        return empty_cache(batch, slots, shape, shape, device, dtype)

    def state_size(self, context_length: int) -> int:
        tokens = context_length if self.window is None else min(self.window, context_length)
        return 2 * tokens * self.n_kv_heads * self.head_dim
