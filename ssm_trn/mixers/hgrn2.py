"""HGRN2: a gated linear RNN with a matrix as state, in which what a channel forgets makes room for what is written.

    f_t = gamma + (1 - gamma) sigmoid(W_f x_t)                          per head and channel
    S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T
    y_t = S_t^T q_t
    out = W_out RMSNorm(y_t)

with q = silu(W_q x) and v = W_v x. Qin et al. 2024 (arXiv:2404.07904), section 3; activations and norm are those of the
language models in the authors' code. It is `linear_attention` with k = 1 - f and log_decay = log f.

gamma, the lower bound of the forget gates, is learned for each channel and grows with depth: layer i = 0, 1, ... of L
starts with i / L, and the first keeps 0 (a cumulative softmax over the layers, of equal numbers at first: Qin et al.
2023, arXiv:2311.04823). A mixer does not know its depth, so `lower_bound` says where its gamma starts, and each layer
learns its own; that deeper layers keep the larger ones is not enforced.

H  n_heads, K  head_dim (of keys and values)
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import RMSNorm, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of


@register("hgrn2")
class HGRN2(Mixer):
    """Options:
    n_heads: H; by default as many of width 64 as d_model holds.
    head_dim: K; d_model / n_heads by default.
    lower_bound: what gamma is at first, in [0, 1): i / L for layer i = 0, 1, ... of L. With 0 it remains 0.
    """

    def __init__(self, d_model: int, n_heads: int | None = None, head_dim: int | None = None, lower_bound: float = 0.0):
        super().__init__()
        if not 0 <= lower_bound < 1:
            raise ValueError(f"lower_bound is {lower_bound}; it must be at least 0 and below 1")
        self.n_heads, self.head_dim = heads_of(d_model, n_heads, head_dim)
        self.lower_bound, width = lower_bound, self.n_heads * self.head_dim
        self.in_proj = nn.Linear(d_model, 3 * width, bias=False)
        self.gamma_logit = nn.Parameter(torch.empty(width)) if lower_bound else None
        self.norm = RMSNorm(width)
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def reset_parameters(self) -> None:
        if self.gamma_logit is not None:
            nn.init.constant_(self.gamma_logit, math.log(self.lower_bound / (1 - self.lower_bound)))

    def gates(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """1 - f_t and log f_t, from W_f x_t in float32."""
        if self.gamma_logit is None:
            return torch.sigmoid(-f), F.logsigmoid(f)
        opened = torch.sigmoid(-self.gamma_logit) * torch.sigmoid(-f)  # (1 - gamma) (1 - sigmoid(W_f x_t))
        # log1p keeps the digits of an f_t near 1; where gamma was learned away, an f_t of 0 would have no logarithm.
        return opened, torch.log1p(-opened.clamp_max(1 - torch.finfo(f.dtype).eps))

    def forward(self, x, state=None, mask=None, reset=None):
        (memory,) = state if state is not None else (None,)
        q, f, v = self.in_proj(x).chunk(3, dim=-1)
        k, log_decay = self.gates(widened(f))
        q, k, v, log_decay = (
            rearrange(part, "b t (h k) -> b t h k", h=self.n_heads) for part in (F.silu(q), k.to(x.dtype), v, log_decay)
        )
        k, v, log_decay, reset = ops.pass_through(mask, k, v, log_decay, reset)
        y, memory = ops.linear_attention(q, k, v, log_decay, reset=reset, state=memory)
        return self.out_proj(self.norm(rearrange(y, "b t h v -> b t (h v)"))), (memory,)

    def init_state(self, batch, max_length, device, dtype):
        return (empty_memory((batch, self.n_heads, self.head_dim, self.head_dim), device, dtype),)
