"""Mamba-3, with single input and output (SISO): a state-space model with a trapezoidal rule and a rotating state.

    dt_t = softplus(W_dt x_t + dt_bias),   A_t = -softplus(W_A x_t),   lambda_t = sigmoid(W_l x_t)           per head
    B_t = RMSNorm(W_B x_t) + B_bias,   C_t = RMSNorm(W_C x_t) + C_bias;   u_t = W_u x_t,   z_t = W_z x_t
    h_t = exp(dt_t A_t) R_t (h_{t-1} + (1 - lambda_t) dt_t B_{t-1} u_{t-1}^T) + lambda_t dt_t B_t u_t^T
    out = W_out ((h_t^T C_t + D u_t) * silu(z_t))

R_t turns the pairs (2 i, 2 i + 1) of the rows of h by -pi dt_t tanh(W_angle x_t)_i, all of them or, by rotary_fraction,
the first. Lahoti et al. 2026 (arXiv:2603.15569): the trapezoid is proposition 1 (section 3.1), the rotation is
propositions 2 to 4 (section 3.2), norms and biases of B and C are from section 3.4, which also drops the short
convolution of Mamba-2 and the norm of its output. Where the paper leaves a choice, this is the authors' code as first
released: the activations of A_t (at most -1e-4), lambda_t and the angles, the pairs, of which half turn, and biases
that start at 1.

How it is computed: B_t and C_t turn instead of h, by phi_t, the sum of the angles through step t. Then k_t and q_t,
which they become, meet by the difference of their phi (a rotary embedding that depends on the data). What step t writes
is weighed lambda_t dt_t at once and (1 - lambda_{t+1}) dt_{t+1} more from the next step on. S holds both, a step late:

    S_t = exp(dt_t A_t) (S_{t-1} + (gamma_{t-1} + (1 - lambda_t) dt_t) k_{t-1} u_{t-1}^T),       gamma_t = lambda_t dt_t
    h_t^T C_t = S_t^T q_t + gamma_t (k_t^T q_t) u_t

This is one call of `linear_attention` with the keys and values of the step before. The state is phi, k, u and gamma of
the last step, and S. phi is kept modulo a turn; only differences of it count, so a reset need not begin it anew.

H  n_heads, P  head_dim (width of u in a head), N  d_state, G  n_groups (the heads of a group share W_B x and W_C x)
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import RMSNorm, previous_step, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, init_time_step_, require_positive, width_of
from ssm_trn.ops.chunks import cut

SLOWEST = 1e-4  # least -A_t
CHUNK_SIZE = 16  # angles that are summed before whole turns are taken out


@register("mamba3")
class Mamba3(Mixer):
    """Options:
    d_state: N, rows of the state.
    expand: width of u over d_model.
    head_dim: P; expand * d_model must be a multiple of it.
    n_groups: G; the number of heads must be a multiple of it.
    rotary_fraction: part of the rows of the state that turn, above 0 and at most 1.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: float = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        rotary_fraction: float = 0.5,
    ):
        super().__init__()
        require_positive(d_state=d_state, expand=expand, head_dim=head_dim, n_groups=n_groups)
        width = width_of(d_model, expand)
        if width % head_dim:
            raise ValueError(f"expand * d_model = {width} is not divisible by head_dim {head_dim}")
        self.n_heads, self.head_dim, self.d_state = width // head_dim, head_dim, d_state
        if self.n_heads % n_groups:
            raise ValueError(
                f"the {self.n_heads} heads (expand * d_model / head_dim) do not divide into {n_groups} groups"
            )
        self.n_angles = int(rotary_fraction * d_state) // 2
        if rotary_fraction > 1 or self.n_angles < 1:
            raise ValueError(
                f"rotary_fraction {rotary_fraction} turns {self.n_angles} pairs of the {d_state} rows (d_state): "
                "it must be at most 1 and give at least one pair"
            )
        self.splits = [width, width, n_groups * d_state, n_groups * d_state, *3 * [self.n_heads], self.n_angles]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.B_norm, self.C_norm = RMSNorm(d_state), RMSNorm(d_state)
        self.B_bias = nn.Parameter(torch.empty(self.n_heads * d_state))
        self.C_bias = nn.Parameter(torch.empty(self.n_heads * d_state))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.D = nn.Parameter(torch.empty(self.n_heads))
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def reset_parameters(self) -> None:
        init_time_step_(self.dt_bias)
        for ones in (self.B_bias, self.C_bias, self.D):
            nn.init.ones_(ones)

    def forward(self, x, state=None, mask=None, reset=None):
        phase, last_k, last_u, last_gamma, memory = state if state is not None else (None,) * 5
        z, u, B, C, dt, A, trapezoid, angle = self.in_proj(x).split(self.splits, dim=-1)
        u = rearrange(u, "b t (h p) -> b t h p", p=self.head_dim)
        dt = F.softplus(dt + self.dt_bias)  # [B, T, H]
        gamma = dt * torch.sigmoid(widened(trapezoid))
        log_decay = -dt * F.softplus(widened(A)).clamp_min(SLOWEST)
        turns = dt[..., None] * torch.tanh(widened(angle))[:, :, None] / 2  # [B, T, H, angles]
        log_decay, turns = ops.pass_through(mask, log_decay, turns)
        phase = running_turns(turns, phase)
        k, q = (
            rotate_pairs(self.for_each_head(part, norm, bias), phase).to(x.dtype)  # [B, T, H, N]
            for part, norm, bias in ((B, self.B_norm, self.B_bias), (C, self.C_norm, self.C_bias))
        )
        k_before, last_k = previous_step(k, last_k, mask, reset)
        u_before, last_u = previous_step(u, last_u, mask, reset)
        gamma_before, last_gamma = previous_step(gamma, last_gamma, mask, reset)
        weight = log_decay.exp() * (gamma_before + (dt - gamma))  # dt - gamma = (1 - lambda) dt
        written = (weight[..., None] * u_before).to(u.dtype)
        k_before, written, reset = ops.pass_through(mask, k_before, written, reset)
        y, memory = ops.linear_attention(q, k_before, written, log_decay, reset=reset, state=memory)
        present = gamma * (widened(q) * k).sum(-1) + self.D
        y = rearrange(y + (present[..., None] * u).to(u.dtype), "b t h p -> b t (h p)")
        return self.out_proj(y * F.silu(z)), (phase[:, -1].clone(), last_k, last_u, last_gamma, memory)

    def for_each_head(self, part: Tensor, norm: RMSNorm, bias: Tensor) -> Tensor:
        """W_B x or W_C x [B, T, G N], normalised in its group, plus the bias of each head: [B, T, H, N], in float32."""
        groups = norm(widened(part).unflatten(-1, (-1, self.d_state)))
        heads = groups.repeat_interleave(self.n_heads // groups.shape[2], 2)
        return heads + bias.view(self.n_heads, self.d_state)

    def init_state(self, batch, max_length, device, dtype):
        phase = empty_memory((batch, self.n_heads, self.n_angles), device, dtype)
        k = torch.zeros(batch, 1, self.n_heads, self.d_state, device=device, dtype=dtype)
        u = torch.zeros(batch, 1, self.n_heads, self.head_dim, device=device, dtype=dtype)
        gamma = empty_memory((batch, 1, self.n_heads), device, dtype)
        return phase, k, u, gamma, empty_memory((batch, self.n_heads, self.d_state, self.head_dim), device, dtype)


def within_a_turn(turns: Tensor) -> Tensor:
    """The same angles between -1/2 and 1/2 turn; exact, and its derivative is 1."""
    return turns - turns.round()


def running_turns(turns: Tensor, before: Tensor | None) -> Tensor:
    """The running sums of angles [B, T, ...] along time, modulo 1 turn, after `before` [B, ...].

    Whole turns are taken out after every few terms: the rounding errors of a sum grow with its size.
    """
    length, turns = turns.shape[1], within_a_turn(turns)
    if length > CHUNK_SIZE:
        sums = cut(turns, CHUNK_SIZE).cumsum(2)  # [B, chunks, C, ...]
        ends = running_turns(sums[:, :, -1], None)
        starts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
        turns = (sums + starts[:, :, None]).flatten(1, 2)[:, :length]
    else:
        turns = turns.cumsum(1)
    return within_a_turn(turns if before is None else turns + before[:, None])


def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """The first pairs (2 i, 2 i + 1) of the channels of x [..., N] rotated by turns [..., pairs]."""
    angles = 2 * math.pi * turns
    cos, sin = angles.cos(), angles.sin()
    pairs, rest = x.split([2 * turns.shape[-1], x.shape[-1] - 2 * turns.shape[-1]], dim=-1)
    first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated.flatten(-2), rest], -1)
