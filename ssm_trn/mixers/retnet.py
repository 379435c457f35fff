"""RetNet's multi-scale retention: a memory per head that turns and decays at rates fixed once and for all.

    gamma_h = 1 - 2^(-5 - h)                                 h = 0, 1, ... counts the heads
    S_t = gamma_h R S_{t-1} + k_t v_t^T
    y_t = S_t^T q_t / sqrt(K)
    out = W_out (RMSNorm_h(y_t) * silu(z_t))

with q, k, v, z = W x, and R the rotation of the key channels by one position, pair i by -theta^(-2i/K). So
y_t = sum over s of gamma^(t-s) (q_t^T R^(t-s) k_s) v_s / sqrt(K), and positions enter as differences only. Sun et al.
2023 (arXiv:2307.08621), equations 1 to 8. The norm of each head makes the paper's normalisations of scores and decays
have no effect; RMSNorm, where the paper writes GroupNorm, is what its authors' code has.

H  n_heads, K  head_dim (of keys), V  value_head_dim
"""

import torch
import torch.nn.functional as F
from torch import nn

from ssm_trn import ops
from ssm_trn.layers import RMSNorm
from ssm_trn.mixers import register
from ssm_trn.mixers.attention import rotate
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, require_positive

THETA = 10000.0


@register("retnet")
class RetNet(Mixer):
    """Options:
    n_heads: H; by default as many of key width 64 as d_model holds.
    head_dim: K, even; d_model / n_heads by default.
    value_head_dim: V; twice head_dim by default.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
    ):
        super().__init__()
        require_positive(value_head_dim=value_head_dim)
        self.n_heads, self.head_dim = heads_of(d_model, n_heads, head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need an even one")
        self.value_head_dim = value_head_dim or 2 * self.head_dim
        key_width, value_width = self.n_heads * self.head_dim, self.n_heads * self.value_head_dim
        self.splits = [key_width, key_width, value_width, value_width]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.norm = RMSNorm(value_width, groups=self.n_heads)
        self.out_proj = nn.Linear(value_width, d_model, bias=False)

    def forward(self, x, state=None, mask=None, reset=None):
        batch, length, _ = x.shape
        (memory,) = state if state is not None else (None,)
        q, k, v, z = self.in_proj(x).split_with_sizes(self.splits, dim=-1)
        q, k, v = (part.view(batch, length, self.n_heads, -1) for part in (q, k, v))  # [B, T, H, K or V]
        # Rather than S at every step, turn q and k by their distance from where S was, and S once, at the end.
        real = torch.ones(batch, length, dtype=torch.bool, device=x.device) if mask is None else mask
        steps = real.cumsum(1, dtype=torch.int64)  # [B, T]
        q, k = rotate(q, steps, THETA), rotate(k, steps, THETA)
        k, v, log_decay, reset = ops.pass_through(mask, k, v, self.log_decay(batch, length), reset)
        y, memory = ops.linear_attention(q, k, v, log_decay, reset=reset, state=memory, scale=self.head_dim**-0.5)
        memory = rotate(memory.permute(0, 3, 1, 2), -steps[:, -1:], THETA).permute(0, 2, 3, 1)
        return self.out_proj(self.norm(y.flatten(2)) * F.silu(z)), (memory,)

    def log_decay(self, batch: int, length: int):
        """log gamma, [B, T, H]."""
        heads = torch.arange(self.n_heads, device=self.norm.weight.device, dtype=self.norm.weight.dtype)
        return torch.log1p(-(2.0 ** (-5 - heads))).expand(batch, length, -1)

    def init_state(self, batch, max_length, device, dtype):
        shape = (batch, self.n_heads, self.head_dim, self.value_head_dim)
        return (empty_memory(shape, device, dtype),)
