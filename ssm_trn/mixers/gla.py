"""Gated linear attention (GLA): each key channel of the memory decays as the input tells it to.

    alpha_t = sigmoid(W_a2 W_a1 x_t + gate_bias)^(1/tau)       per head and key channel
    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T
    y_t = S_t^T q_t / sqrt(K)
    out = W_out (RMSNorm(y_t) * silu(z_t))

with q, k, v, z = W x. Yang et al. 2023 (arXiv:2312.06635), sections 4.1 and 4.4; RMSNorm, where the paper writes
LayerNorm, is what its authors' code has.

H  n_heads, K  head_dim (of keys), V  value_head_dim, R  gate_rank, tau  gate_temperature
"""

import torch
import torch.nn.functional as F
from torch import nn

from ssm_trn import ops
from ssm_trn.layers import RMSNorm
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, require_positive


@register("gla")
class GatedLinearAttention(Mixer):
    """Options:
    n_heads: H; by default as many of value width 64 as d_model holds.
    head_dim: K; half of value_head_dim by default.
    value_head_dim: V; d_model / n_heads by default.
    gate_rank: R, rank of the map from x to the decays.
    gate_temperature: tau; the larger, the slower the memory decays.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
    ):
        super().__init__()
        require_positive(head_dim=head_dim, gate_rank=gate_rank, gate_temperature=gate_temperature)
        self.n_heads, self.value_head_dim = heads_of(d_model, n_heads, value_head_dim)
        self.head_dim = head_dim or max(1, self.value_head_dim // 2)
        self.gate_temperature = gate_temperature
        key_width, value_width = self.n_heads * self.head_dim, self.n_heads * self.value_head_dim
        self.splits = [key_width, key_width, value_width, value_width, gate_rank]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.decay_proj = nn.Linear(gate_rank, key_width, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(key_width))
        self.norm = RMSNorm(self.value_head_dim)
        self.out_proj = nn.Linear(value_width, d_model, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate_bias)

    def forward(self, x, state=None, mask=None, reset=None):
        batch, length, _ = x.shape
        (memory,) = state if state is not None else (None,)
        q, k, v, z, a = self.in_proj(x).split_with_sizes(self.splits, dim=-1)
        log_decay = F.logsigmoid(self.decay_proj(a) + self.gate_bias) / self.gate_temperature
        q, k, log_decay = (part.view(batch, length, -1, self.head_dim) for part in (q, k, log_decay))  # [B, T, H, K]
        v, z = (part.view(batch, length, -1, self.value_head_dim) for part in (v, z))  # [B, T, H, V]
        k, v, log_decay, reset = ops.pass_through(mask, k, v, log_decay, reset)
        y, memory = ops.linear_attention(q, k, v, log_decay, reset=reset, state=memory, scale=self.head_dim**-0.5)
        return self.out_proj((self.norm(y) * F.silu(z)).flatten(2)), (memory,)

    def init_state(self, batch, max_length, device, dtype):
        shape = (batch, self.n_heads, self.head_dim, self.value_head_dim)
        return (empty_memory(shape, device, dtype),)
