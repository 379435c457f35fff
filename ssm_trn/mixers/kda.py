"""Kimi Delta Attention (KDA): the memory of DeltaNet, in which each key channel decays at a rate of its own.

    alpha_t = exp(-exp(A_log) softplus(W_f2 W_f1 x_t + dt_bias))       per head and key channel; A_log per head
    S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T
    y_t = S_t^T q_t / sqrt(K)
    out = W_out (RMSNorm(y_t) * sigmoid(W_g2 W_g1 x_t))

with q, k, v and beta as in deltanet.py; the maps of both gates have the rank of one head. Kimi Team 2025
(arXiv:2510.26692), equation 1 and section 4.

H  n_heads (of values), K  head_dim (of keys), V  value_head_dim
"""

import torch
import torch.nn.functional as F
from torch import nn

from ssm_trn.mixers import register
from ssm_trn.mixers.base import init_decay_rate_, init_time_step_
from ssm_trn.mixers.deltanet import DeltaNet


@register("kda")
class KimiDeltaAttention(DeltaNet):
    """Options: those of `deltanet`."""

    def add_gates(self):
        self.forget_proj = nn.Linear(self.head_dim, self.n_heads * self.head_dim, bias=False)
        self.gate_proj = nn.Linear(self.value_head_dim, self.n_heads * self.value_head_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads * self.head_dim))
        return [self.head_dim, self.value_head_dim]

    def reset_parameters(self) -> None:
        init_decay_rate_(self.A_log)
        init_time_step_(self.dt_bias)

    def log_decay(self, f, g):
        rate = F.softplus(self.forget_proj(f) + self.dt_bias).unflatten(-1, (self.n_heads, -1))  # [B, T, H, K]
        return -self.A_log.exp()[:, None] * rate

    def gated(self, y, f, g):
        return y * torch.sigmoid(self.gate_proj(g)).view_as(y)
