"""RWKV-7, called Goose: a delta rule that removes along one key what it then writes under another, channel by channel.

    x^p_t = x_t + (x_{t-1} - x_t) * mu_p,   p = r, k, v, d, a, g;   r, k, v = W_r x^r, W_k x^k, W_v x^v
    w_t = exp(-e^(-1/2) sigmoid(d_t)),   d_t = decay_bias + B_d tanh(A_d x^d_t)       per head and key channel
    a_t = sigmoid(rate_bias + B_a A_a x^a_t)                                          the in-context learning rate
    kappa_t = (xi * k_t) / |xi * k_t|                                                 the removal key, of length 1
    k~_t = k_t * (1 + alpha * (a_t - 1))                                              the replacement key
    S_t = diag(w_t) S_{t-1} - (a_t * kappa_t) (kappa_t^T S_{t-1}) + k~_t v_t^T
    y_t = GroupNorm_h(S_t^T r_t) + (r_t^T (rho * k~_t)) v_t
    out = W_out (y_t * B_g sigmoid(A_g x^g_t))

Peng et al. 2025 (arXiv:2503.14456), section 4.1, equations 3 to 22. It is `delta_rule` with erase = (a kappa, kappa).

Left out is the value residual (equations 8 to 10), by which all layers but the first mix the values of the first into
theirs: a mixer knows no other layer. The paper's channel mixing is a feed-forward layer, for which our blocks have
SwiGLU.

Initial values are those of the authors' code (RWKV-LM, RWKV-v7, of May 2025) for a layer at relative depth `depth`, as
a mixer does not know its depth, but for two things: out_proj starts small, as in all our mixers, and not at 0; the norm
starts at 1 at any depth.

H  n_heads, K  head_dim (of keys and values)
"""

import math

import torch
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import GroupNorm, previous_step, unit_length, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, require_positive
from ssm_trn.mixers.rwkv6 import low_rank, require_depth, shift_ramp

FASTEST = math.exp(-0.5)  # bound of -log w_t: a channel keeps at least 0.545 of what it holds


@register("rwkv7")
class RWKV7(Mixer):
    """Options:
    n_heads: H; by default as many of width 64 as d_model holds.
    head_dim: K; d_model / n_heads by default.
    rank: of the maps to the decay and to the learning rate; by default about 1.8 sqrt(d_model), a multiple of 32.
    gate_rank: of the map to the output gate; by default about 0.6 d_model^0.8, a multiple of 32.
    depth: place of the layer in the model, 0 for the first to 1 for the last; for the initial values alone.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        head_dim: int | None = None,
        rank: int | None = None,
        gate_rank: int | None = None,
        depth: float = 0.5,
    ):
        super().__init__()
        require_positive(rank=rank, gate_rank=gate_rank)
        self.depth = require_depth(depth)
        self.n_heads, self.head_dim = heads_of(d_model, n_heads, head_dim)
        width = self.n_heads * self.head_dim
        rank = rank or max(32, 32 * round(1.8 * d_model**0.5 / 32))
        gate_rank = gate_rank or max(32, 32 * round(0.6 * d_model**0.8 / 32))
        self.shift = nn.Parameter(torch.empty(6 * d_model))  # mu_p; of one dimension: not for weight decay
        self.r_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, width, bias=False) for _ in range(3))
        self.decay_proj = low_rank(d_model, rank, width, nn.Tanh())
        self.rate_proj = low_rank(d_model, rank, width, nn.Identity())
        self.gate_proj = low_rank(d_model, gate_rank, width, nn.Sigmoid())
        self.decay_bias = nn.Parameter(torch.empty(width))
        self.rate_bias = nn.Parameter(torch.empty(width))
        self.xi = nn.Parameter(torch.empty(width))
        self.alpha = nn.Parameter(torch.empty(width))
        self.rho = nn.Parameter(torch.empty(width))
        self.norm = GroupNorm(width, self.n_heads, eps=1e-5 * self.head_dim)
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def reset_parameters(self) -> None:
        d_model, width = self.r_proj.in_features, self.r_proj.out_features
        exponents = (0.2, 0.7, 0.7, 0.9, 0.9, 0.2)  # of r, k, v, d, a, g
        self.shift.data.copy_(torch.cat([shift_ramp(d_model, e * (1 - self.depth)) for e in exponents]))
        ramp = torch.linspace(0, 1, width, dtype=torch.float32)
        wave = torch.linspace(-1, 1, self.head_dim, dtype=torch.float32).repeat(self.n_heads)
        wave = wave * wave.abs()
        self.decay_bias.data.copy_(-5.5 + 6 * ramp ** (1 + self.depth**0.3) + 2.5 * wave)
        self.rate_bias.data.copy_(-0.19 + 0.3 * wave + 0.4 * (ramp - 0.5))
        self.xi.data.copy_(0.71 - 0.1 * (ramp - 0.5))
        nn.init.constant_(self.alpha, 1.02)
        nn.init.constant_(self.rho, -0.04)
        for projection, size in ((self.r_proj, 0.5), (self.k_proj, 0.05), (self.v_proj, 0.5)):
            nn.init.uniform_(projection.weight, -size * d_model**-0.5, size * d_model**-0.5)
        for down, _, up in (self.decay_proj, self.rate_proj, self.gate_proj):
            nn.init.zeros_(down.weight)
            init_orthogonal_(up.weight, 0.1)

    def forward(self, x, state=None, mask=None, reset=None):
        last, memory = state if state is not None else (None, None)
        before, last = previous_step(x, last, mask, reset)
        wide = widened(x)
        change = before - wide
        x_r, x_k, x_v, x_d, x_a, x_g = ((wide + change * mu).to(x.dtype) for mu in self.shift.view(6, -1))
        r, k, v = self.r_proj(x_r), self.k_proj(x_k), self.v_proj(x_v)
        log_decay = -FASTEST * torch.sigmoid(self.decay_proj(x_d) + self.decay_bias)
        rate = torch.sigmoid(self.rate_proj(x_a) + self.rate_bias)
        k, v, log_decay, rate, reset = ops.pass_through(mask, k, v, log_decay, rate, reset)
        removal, replacement = self.xi * k, k * (1 + self.alpha * (rate - 1))
        r, v, log_decay, rate, removal, replacement, rho = (
            part.unflatten(-1, (self.n_heads, -1)) for part in (r, v, log_decay, rate, removal, replacement, self.rho)
        )
        removal = unit_length(removal, eps=1e-12)  # [B, T, H, K]
        erase = (rate * removal, removal)
        y, memory = ops.delta_rule(r, replacement, v, None, log_decay, erase=erase, reset=reset, state=memory)
        bonus = (r * rho * replacement).sum(-1, keepdim=True) * v
        y = self.norm(y.flatten(2)) + bonus.flatten(2).to(x.dtype)
        return self.out_proj(y * self.gate_proj(x_g)), (last, memory)

    def init_state(self, batch, max_length, device, dtype):
        last = torch.zeros(batch, 1, self.r_proj.in_features, device=device, dtype=dtype)
        return last, empty_memory((batch, self.n_heads, self.head_dim, self.head_dim), device, dtype)


def init_orthogonal_(weight: Tensor, gain: float) -> None:
    """Fills a weight [out, in] with orthonormal columns or rows, times gain and, where in > out, sqrt(in / out)."""
    drawn = nn.init.orthogonal_(torch.empty(weight.shape, dtype=torch.float32))  # bfloat16 has no QR decomposition
    weight.data.copy_(gain * max(1.0, weight.shape[1] / weight.shape[0]) ** 0.5 * drawn)
