"""DeltaNet: a memory that overwrites what it held under a key instead of adding to it.

    beta_t = sigmoid(W_b x_t)       per head
    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    y_t = S_t^T q_t / sqrt(K)
    out = W_out RMSNorm(y_t)

with q, k, v = silu(causal convolution of W x), q and k of length 1. Yang et al. 2024 (arXiv:2406.06484), sections 2.2
and 3.3. Negative eigenvalues, beta_t = 2 sigmoid(W_b x_t): Grazzi et al. 2024 (arXiv:2411.12537).

H  n_heads (of values), Hk  n_key_heads, K  head_dim (of keys), V  value_head_dim
"""

import torch
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import RMSNorm, ShortConv, unit_length, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, require_positive


@register("deltanet")
class DeltaNet(Mixer):
    """Options:
    n_heads: H; by default as many of width 64 as d_model holds.
    n_key_heads: Hk, a divisor of n_heads; by default as many. Heads of a group share q and k.
    head_dim: K; d_model / n_heads by default.
    value_head_dim: V; head_dim by default.
    conv_width: steps that the convolution sees.
    negative_eigenvalues: beta in [0, 2] instead of [0, 1]; the state transition then has eigenvalues down to -1.
    norm_eps: epsilon of the norm of the output.

    Its descendants add a decay and an output gate: `add_gates` makes their parameters, `log_decay` and `gated` use
    them. Those that write more than once a token set `n_writes` and take the writes apart in `recur`.
    """

    n_writes = 1

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_key_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        require_positive(n_key_heads=n_key_heads, value_head_dim=value_head_dim, conv_width=conv_width)
        self.n_heads, self.head_dim = heads_of(d_model, n_heads, head_dim)
        self.n_key_heads = n_key_heads = n_key_heads or self.n_heads
        if self.n_heads % n_key_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_key_heads {n_key_heads}")
        self.value_head_dim = value_head_dim or self.head_dim
        self.beta_range = 2.0 if negative_eigenvalues else 1.0
        key_width, value_width = n_key_heads * self.head_dim, self.n_heads * self.value_head_dim
        self.convolved_splits = [key_width, self.n_writes * key_width, self.n_writes * value_width]
        self.splits = [sum(self.convolved_splits), self.n_writes * self.n_heads, *self.add_gates()]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.conv = ShortConv(sum(self.convolved_splits), conv_width, bias=False)
        self.norm = RMSNorm(self.value_head_dim, norm_eps)
        self.out_proj = nn.Linear(value_width, d_model, bias=False)

    def add_gates(self) -> list[int]:
        """Makes the parameters of the gates and returns the widths of what they need from in_proj."""
        return []

    def log_decay(self, *gates: Tensor) -> Tensor | None:
        """Log of the decay, [B, T, H] or [B, T, H, K], from what add_gates asked for; None: no decay."""
        return None

    def gated(self, y: Tensor, *gates: Tensor) -> Tensor:
        """The normalised output y [B, T, H, V] behind its gate."""
        return y

    def recur(self, q, k, v, beta, log_decay, reset, memory):
        """The delta rule over all tokens; q [B, T, Hk, K], and k, v, beta with as many heads for each of the writes."""
        scale = self.head_dim**-0.5
        return ops.delta_rule(q, k, v, beta, log_decay, reset=reset, state=memory, scale=scale)

    def forward(self, x, state=None, mask=None, reset=None):
        batch, length, _ = x.shape
        tail, memory = state if state is not None else (None, None)
        convolved, b, *gates = self.in_proj(x).split_with_sizes(self.splits, dim=-1)
        convolved, tail = self.conv(convolved, tail, mask, reset)
        q, k, v = convolved.split_with_sizes(self.convolved_splits, dim=-1)
        q, k = (unit_length(part.view(batch, length, -1, self.head_dim)) for part in (q, k))  # [B, T, Hk, K]
        v = v.view(batch, length, -1, self.value_head_dim)  # [B, T, H, V]
        beta = self.beta_range * torch.sigmoid(widened(b))  # [B, T, writes H]
        beta, log_decay, reset = ops.pass_through(mask, beta, self.log_decay(*gates), reset)
        y, memory = self.recur(q, k, v, beta, log_decay, reset, memory)
        y = self.gated(self.norm(y), *gates)
        return self.out_proj(y.flatten(2)), (tail, memory)

    def init_state(self, batch, max_length, device, dtype):
        shape = (batch, self.n_heads, self.head_dim, self.value_head_dim)
        return self.conv.init_state(batch, device, dtype), empty_memory(shape, device, dtype)
