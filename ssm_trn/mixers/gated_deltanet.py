"""Gated DeltaNet: the memory of DeltaNet, with a decay that can clear it at once and a gate on its output.

    alpha_t = exp(-exp(A_log) softplus(W_a x_t + dt_bias)),   beta_t = sigmoid(W_b x_t)       per head
    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    y_t = S_t^T q_t / sqrt(K)
    out = W_out (RMSNorm(y_t) * silu(z_t))

with q, k, v and beta as in deltanet.py and z = W_z x. Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), equation 10
and figure 1.

H  n_heads (of values), K  head_dim (of keys), V  value_head_dim
"""

import torch
import torch.nn.functional as F
from torch import nn

from ssm_trn.mixers import register
from ssm_trn.mixers.base import init_decay_rate_, init_time_step_
from ssm_trn.mixers.deltanet import DeltaNet


@register("gated_deltanet")
class GatedDeltaNet(DeltaNet):
    """Options: those of `deltanet`."""

    def add_gates(self):
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        return [self.n_heads, self.n_heads * self.value_head_dim]

    def reset_parameters(self) -> None:
        init_decay_rate_(self.A_log)
        init_time_step_(self.dt_bias)

    def log_decay(self, a, z):
        return -self.A_log.exp() * F.softplus(a + self.dt_bias)  # [B, T, H]

    def gated(self, y, a, z):
        return y * F.silu(z).view_as(y)
