"""Mamba-2: a state-space model with one scalar decay per head and step.

    dt_t = softplus(W_dt x_t + dt_bias)                     per head
    S_t  = exp(-dt_t exp(A_log)) S_{t-1} + B_t (dt_t u_t)^T
    y_t  = C_t^T S_t + D u_t
    out  = W_out RMSNorm(y_t * silu(z_t))

with u, B, C = silu(causal convolution of W x) and z = W_z x. Dao and Gu 2024 (arXiv:2405.21060), sections 6, 7.
It is `linear_attention` with q = C, k = B, v = dt u and log_decay = -dt exp(A_log). Negative eigenvalues, a decay of
2 exp(-dt exp(A_log)) - 1 in [-1, 1]: Grazzi et al. 2024 (arXiv:2411.12537).

H  n_heads, P  head_dim (width of u in a head), N  d_state, G  n_groups (the heads of a group share B and C)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import RMSNorm, ShortConv
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, init_decay_rate_, init_time_step_, require_positive, width_of
from ssm_trn.ops.contexts import cast


@register("mamba2")
class Mamba2(Mixer):
    """Options:
    d_state: N, rows of the state.
    expand: width of u over d_model.
    head_dim: P; expand * d_model must be a multiple of it.
    n_groups: G; the number of heads must be a multiple of it.
    conv_width: steps that the convolution sees.
    norm_before_gate: RMSNorm(y) * silu(z) instead of RMSNorm(y * silu(z)).
    negative_eigenvalues: a decay in [-1, 1] instead of [0, 1].
    norm_eps: epsilon of the norm of the output.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: float = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        conv_width: int = 4,
        norm_before_gate: bool = False,
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        require_positive(d_state=d_state, expand=expand, head_dim=head_dim, n_groups=n_groups, conv_width=conv_width)
        width = width_of(d_model, expand)
        if width % head_dim:
            raise ValueError(f"expand * d_model = {width} is not divisible by head_dim {head_dim}")
        self.head_dim, self.d_state = head_dim, d_state
        self.norm_before_gate, self.negative_eigenvalues = norm_before_gate, negative_eigenvalues
        self.n_heads = width // head_dim
        if self.n_heads % n_groups:
            raise ValueError(
                f"the {self.n_heads} heads (expand * d_model / head_dim) do not divide into {n_groups} groups"
            )
        convolved = width + 2 * n_groups * d_state
        self.splits = [width, convolved, self.n_heads]
        self.convolved_splits = [width, n_groups * d_state, n_groups * d_state]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.conv = ShortConv(convolved, conv_width)
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.D = nn.Parameter(torch.empty(self.n_heads))
        self.norm = RMSNorm(width, norm_eps, groups=n_groups)
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def reset_parameters(self) -> None:
        init_decay_rate_(self.A_log)
        init_time_step_(self.dt_bias)
        nn.init.ones_(self.D)

    def forward(self, x, state=None, mask=None, reset=None):
        batch, length, _ = x.shape
        tail, memory = state if state is not None else (None, None)
        z, convolved, dt = self.in_proj(x).split_with_sizes(self.splits, dim=-1)
        convolved, tail = self.conv(convolved, tail, mask, reset)
        u, B, C = convolved.split_with_sizes(self.convolved_splits, dim=-1)
        u = u.view(batch, length, -1, self.head_dim)  # [B, T, H, P]
        B, C = (part.view(batch, length, -1, self.d_state) for part in (B, C))  # [B, T, G, N]
        dt = F.softplus(dt + self.dt_bias)  # [B, T, H]
        dt, reset = ops.pass_through(mask, dt, reset)  # a step of length 0 neither decays nor writes
        v, log_decay = cast(dt[..., None] * u, u.dtype), -dt * self.A_log.exp()
        if self.negative_eigenvalues:
            log_decay, sign = signed_decay(log_decay)
            y, memory = ops.linear_attention(C, B, sign[..., None] * v, log_decay, reset=reset, state=memory)
            y, memory = sign[..., None] * y, sign[:, -1, :, None, None] * memory
        else:
            y, memory = ops.linear_attention(C, B, v, log_decay, reset=reset, state=memory)
        y = cast(torch.addcmul(y, u, self.D[:, None]), u.dtype).flatten(2)
        y = self.norm(y) * F.silu(z) if self.norm_before_gate else self.norm(y * F.silu(z))
        return self.out_proj(y), (tail, memory)

    def init_state(self, batch, max_length, device, dtype):
        shape = (batch, self.n_heads, self.d_state, self.head_dim)
        return self.conv.init_state(batch, device, dtype), empty_memory(shape, device, dtype)


def signed_decay(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The decay a_t = 2 exp(log_decay_t) - 1 as log |a_t| and c_t, the sign of a_1 ... a_t; both [B, T, H].

    S_t = a_t S_{t-1} + k_t v_t^T is S_t = c_t S'_t, where S'_t decays by |a_t| and is written c_t v_t: so the signs
    leave the decay for the values and the output.
    """
    negative = log_decay < -math.log(2)
    sign = 1 - 2 * (negative.cumsum(1, dtype=torch.int64) % 2)
    # |a| - 1 without cancellation where a is near 1 or -1; an |a| of 0 would have no logarithm to differentiate.
    below_one = torch.where(negative, -2 * log_decay.exp(), 2 * torch.expm1(log_decay))
    return torch.log1p(below_one.clamp_min(torch.finfo(log_decay.dtype).eps - 1)), sign
