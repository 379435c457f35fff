"""Based: linear attention with features whose product is the second-order Taylor series of softmax's exponential.

    phi(q)^T phi(k) = 1 + s + s^2 / 2,   s = q^T k / sqrt(K)          per head

The rest is linear_attention.py; K is small, since there are 1 + K + K (K + 1) / 2 features. Arora et al. 2024
(arXiv:2402.18668), section 4.1. The paper takes all K^2 products of two channels as features; here those that are equal
are one, with its weight, which gives the same phi(q)^T phi(k) with little more than half of the state. It is 1/2 or
more, so that the normaliser is never small.

The architecture of the paper alternates this mixer with attention over a small window of tokens, section 4.2:
`layers: [based, {mixer: attention, window: 64}]`.

H  n_heads, K  head_dim (of keys), V  value_head_dim
"""

import torch
from torch import Tensor

from ssm_trn.mixers import register
from ssm_trn.mixers.base import heads_of
from ssm_trn.mixers.linear_attention import LinearAttention


@register("based")
class Based(LinearAttention):
    """Options:
    n_heads: H; by default as many of value width 64 as d_model holds.
    head_dim: K.
    value_head_dim: V; d_model / n_heads by default.
    """

    def __init__(self, d_model: int, n_heads: int | None = None, head_dim: int = 16, value_head_dim: int | None = None):
        n_heads, value_head_dim = heads_of(d_model, n_heads, value_head_dim)
        super().__init__(d_model, n_heads, head_dim, value_head_dim)
        self.n_features = 1 + head_dim + head_dim * (head_dim + 1) // 2

    def features(self, x: Tensor) -> Tensor:
        x = x * self.head_dim**-0.25
        squares = 2**-0.5 * x.square()
        products = (x[..., i:] * x[..., :-i] for i in range(1, self.head_dim))  # of channels that are i apart
        return torch.cat([torch.ones_like(x[..., :1]), x, squares, *products], -1)
