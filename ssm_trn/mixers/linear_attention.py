"""Linear attention: the weight of a past token is a product of features, so that one matrix remembers all of them.

    S_t = S_{t-1} + phi(k_t) v_t^T,   z_t = z_{t-1} + phi(k_t)       per head
    y_t = S_t^T phi(q_t) / (z_t^T phi(q_t) + eps)
    out = W_out y_t

with q, k, v = W x and phi(x) = elu(x) + 1, channel by channel. Katharopoulos et al. 2020 (arXiv:2006.16236), equations
7 and 16 to 20. The normaliser z is one more column of S, with a value of 1. eps is that of the authors' code; it keeps
padding before the first token from being 0 / 0.

Nothing here tells an early token from a late one: mix it with layers that do (attention, a convolution, a decay).

H  n_heads, K  head_dim (of keys), V  value_head_dim, F  n_features
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, require_positive

EPS = 1e-6


@register("linear_attention")
class LinearAttention(Mixer):
    """Options:
    n_heads: H; by default as many of width 64 as d_model holds.
    head_dim: K; d_model / n_heads by default.
    value_head_dim: V; head_dim by default.

    A descendant with another phi defines `features` and says how many there are in `n_features`.
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
        self.n_features, self.value_head_dim = self.head_dim, value_head_dim or self.head_dim
        key_width, value_width = self.n_heads * self.head_dim, self.n_heads * self.value_head_dim
        self.splits = [key_width, key_width, value_width]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.out_proj = nn.Linear(value_width, d_model, bias=False)

    def features(self, x: Tensor) -> Tensor:
        """phi(x), [..., K] -> [..., F]."""
        return x.clamp(max=0).exp() + x.relu()  # elu(x) + 1, without rounding to 0 where x is far below 0

    def forward(self, x, state=None, mask=None, reset=None):
        (memory,) = state if state is not None else (None,)
        q, k, v = (
            rearrange(part, "b t (h k) -> b t h k", h=self.n_heads) for part in self.in_proj(x).split(self.splits, -1)
        )
        q, k = self.features(widened(torch.stack([q, k]))).to(x.dtype)  # [B, T, H, F]
        v = F.pad(v, (0, 1), value=1.0)  # [B, T, H, V + 1]
        k, v, reset = ops.pass_through(mask, k, v, reset)
        y, memory = ops.linear_attention(q, k, v, reset=reset, state=memory)
        y, normaliser = widened(y).split([self.value_head_dim, 1], -1)
        y = (y / (normaliser + EPS)).to(x.dtype)
        return self.out_proj(rearrange(y, "b t h v -> b t (h v)")), (memory,)

    def init_state(self, batch, max_length, device, dtype):
        shape = (batch, self.n_heads, self.n_features, self.value_head_dim + 1)
        return (empty_memory(shape, device, dtype),)
