"""RWKV-6, called Finch: a gated linear attention whose inputs lean towards the token before, as the input tells them.

    lean_p(x_t) = x_t + (x_{t-1} - x_t) * (mu_p + B_p tanh(A_p (x_t + (x_{t-1} - x_t) * mu_x)))      p = d, k, v, r, g
    r_t, k_t, v_t, g_t = W_r lean_r(x_t), W_k lean_k(x_t), W_v lean_v(x_t), W_g lean_g(x_t)
    w_t = exp(-exp(d_t)),   d_t = decay_bias + B tanh(A lean_d(x_t))                per head and key channel
    y_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t
    S_t = diag(w_t) S_{t-1} + k_t v_t^T
    out = W_out (GroupNorm_h(y_t) * silu(g_t))

Peng et al. 2024 (arXiv:2404.05892), section 4.2, equations 14 to 22; the paper writes lambda_p for mu_p. The present
token is read with the weight u, the bonus. This is the paper's time mixing alone: its channel mixing is a feed-forward
layer, for which our blocks have SwiGLU.

Initial values are those of appendix I for a layer at relative depth `depth`, as a mixer does not know its depth, but
for three things: out_proj starts small, as in all our mixers, and not at 0; the norm starts at 1 at any depth; and the
waves of u have mean 0, as in the authors' code.

H  n_heads, K  head_dim (of keys and values)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import GroupNorm, previous_step, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, require_positive


@register("rwkv6")
class RWKV6(Mixer):
    """Options:
    n_heads: H; by default as many of width 64 as d_model holds.
    head_dim: K; d_model / n_heads by default.
    shift_rank: rank of each of the five maps B_p A_p.
    decay_rank: rank of the map B A to the decay.
    depth: place of the layer in the model, 0 for the first to 1 for the last; for the initial values alone.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        head_dim: int | None = None,
        shift_rank: int = 32,
        decay_rank: int = 64,
        depth: float = 0.5,
    ):
        super().__init__()
        require_positive(shift_rank=shift_rank, decay_rank=decay_rank)
        self.depth = require_depth(depth)
        self.n_heads, self.head_dim = heads_of(d_model, n_heads, head_dim)
        width = self.n_heads * self.head_dim
        self.shift = nn.Parameter(torch.empty(6 * d_model))  # mu_x, then mu_p; of one dimension: not for weight decay
        self.shift_down = nn.Linear(d_model, 5 * shift_rank, bias=False)
        self.shift_up = nn.ModuleList(nn.Linear(shift_rank, d_model, bias=False) for _ in range(5))
        self.decay_proj = low_rank(d_model, decay_rank, width, nn.Tanh())
        self.decay_bias = nn.Parameter(torch.empty(width))
        self.bonus = nn.Parameter(torch.empty(width))
        self.k_proj, self.v_proj, self.r_proj, self.g_proj = (nn.Linear(d_model, width, bias=False) for _ in range(4))
        self.norm = GroupNorm(width, self.n_heads, eps=1e-5 * self.head_dim)
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def reset_parameters(self) -> None:
        d_model, width = self.r_proj.in_features, self.r_proj.out_features
        ramp = torch.linspace(0, 1, width, dtype=torch.float32)
        mu_k, mu_r = shift_ramp(d_model, 1 - self.depth), shift_ramp(d_model, (1 - self.depth) / 2)
        self.shift.data.copy_(torch.cat([mu_k, mu_k, mu_k, mu_k - 0.3 * self.depth, mu_r, mu_r]))  # x, d, k, v, r, g
        self.decay_bias.data.copy_(-6 + 5 * ramp ** (0.7 + 1.3 * self.depth))
        self.bonus.data.copy_(self.depth * (1 - ramp) + 0.1 * ((torch.arange(width) + 1) % 3 - 1))
        for projection in (self.shift_down, *self.shift_up, self.decay_proj[0], self.decay_proj[2]):
            nn.init.uniform_(projection.weight, -1e-4, 1e-4)
        for projection in (self.k_proj, self.v_proj, self.r_proj, self.g_proj):
            nn.init.uniform_(projection.weight, -(d_model**-0.5), d_model**-0.5)

    def leaning(self, x: Tensor, before: Tensor) -> list[Tensor]:
        """lean_p(x) for p = d, k, v, r, g; `before` is x one step earlier."""
        wide, (mu_x, *mu) = widened(x), self.shift.view(6, -1)
        change = before - wide
        low = torch.tanh(self.shift_down((wide + change * mu_x).to(x.dtype))).chunk(5, dim=-1)
        return [(wide + change * (mu[p] + self.shift_up[p](low[p]))).to(x.dtype) for p in range(5)]

    def forward(self, x, state=None, mask=None, reset=None):
        last, memory = state if state is not None else (None, None)
        before, last = previous_step(x, last, mask, reset)
        x_d, x_k, x_v, x_r, x_g = self.leaning(x, before)
        # From d_t = 7 on w_t and its gradient are 0 in any precision; exp(d_t) may be inf, with a gradient of inf * 0.
        log_decay = -torch.exp((self.decay_proj(x_d) + self.decay_bias).clamp_max(7))
        r, k, v, log_decay = (
            part.unflatten(-1, (self.n_heads, -1))  # [B, T, H, K]
            for part in (self.r_proj(x_r), self.k_proj(x_k), self.v_proj(x_v), log_decay)
        )
        k, v, log_decay, reset = ops.pass_through(mask, k, v, log_decay, reset)
        bonus = self.bonus.view(self.n_heads, -1)
        y, memory = ops.linear_attention(r, k, v, log_decay, bonus=bonus, reset=reset, state=memory)
        return self.out_proj(self.norm(y.flatten(2)) * F.silu(self.g_proj(x_g))), (last, memory)

    def init_state(self, batch, max_length, device, dtype):
        last = torch.zeros(batch, 1, self.r_proj.in_features, device=device, dtype=dtype)
        return last, empty_memory((batch, self.n_heads, self.head_dim, self.head_dim), device, dtype)


def require_depth(depth: float) -> float:
    """depth, or a ValueError if no layer can have it."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; it must be between 0, the first layer, and 1, the last")
    return depth


def low_rank(inputs: int, rank: int, outputs: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), activation, nn.Linear(rank, outputs, bias=False))


def shift_ramp(d_model: int, exponent: float) -> Tensor:
    """1 - (i / d_model)^exponent for the channels i: from leaning on the token before to keeping the present one."""
    return 1 - (torch.arange(d_model, dtype=torch.float32) / d_model) ** exponent
