"""Mamba: a state-space model whose step length, input and output maps depend on the input.

    dt_t = softplus(W_dt W_low u_t + dt_bias)               per channel
    h_t  = exp(-dt_t exp(A_log)) h_{t-1} + dt_t B_t u_t     per channel and state
    y_t  = C_t h_t + D u_t
    out  = W_out (y_t * silu(z_t))

with u = silu(causal convolution of W x), z = W_z x and B, C = W_B u, W_C u. Gu and Dao 2023 (arXiv:2312.00752),
algorithm 2 and section 3.6.

N  d_state, R  dt_rank
"""

import torch
import torch.nn.functional as F
from torch import nn

from ssm_trn import ops
from ssm_trn.layers import ShortConv, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, init_time_step_, require_positive, width_of


@register("mamba")
class Mamba(Mixer):
    """Options:
    d_state: N, states of each channel.
    expand: width of u over d_model.
    dt_rank: R, rank of the map to the step lengths; d_model / 16 rounded up by default.
    conv_width: steps that the convolution sees.
    negative_eigenvalues: decay 2 exp(-dt_t exp(A_log)) - 1, in [-1, 1] (Grazzi et al. 2024, arXiv:2411.12537).
    bcdt_norm_eps: if given, W_low u, B and C pass RMS norms without weights, with this epsilon, as in Falcon Mamba
        (Zuo et al. 2024, arXiv:2410.05355).
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        expand: float = 2,
        dt_rank: int | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = False,
        bcdt_norm_eps: float | None = None,
    ):
        super().__init__()
        require_positive(
            d_state=d_state, expand=expand, dt_rank=dt_rank, conv_width=conv_width, bcdt_norm_eps=bcdt_norm_eps
        )
        width, dt_rank = width_of(d_model, expand), dt_rank or -(-d_model // 16)
        self.width, self.dt_rank = width, dt_rank
        self.negative_eigenvalues, self.bcdt_norm_eps = negative_eigenvalues, bcdt_norm_eps
        self.splits = [dt_rank, d_state, d_state]
        self.in_proj = nn.Linear(d_model, 2 * width, bias=False)
        self.conv = ShortConv(width, conv_width)
        self.x_proj = nn.Linear(width, sum(self.splits), bias=False)
        self.dt_proj = nn.Linear(dt_rank, width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.A_log = nn.Parameter(torch.empty(width, d_state))
        self.D = nn.Parameter(torch.empty(width))
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def reset_parameters(self) -> None:
        width, d_state = self.A_log.shape
        rates = torch.arange(1, d_state + 1, device=self.A_log.device, dtype=self.A_log.dtype)
        self.A_log.data.copy_(rates.log().expand(width, -1))  # S4D-real: A_n = -n
        init_time_step_(self.dt_bias)
        bound = self.dt_proj.in_features**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        nn.init.ones_(self.D)

    def forward(self, x, state=None, mask=None, reset=None):
        tail, memory = state if state is not None else (None, None)
        u, z = self.in_proj(x).split_with_sizes(2 * [self.width], dim=-1)
        u, tail = self.conv(u, tail, mask, reset)
        dt, B, C = self.x_proj(u).split_with_sizes(self.splits, dim=-1)
        if self.bcdt_norm_eps is not None:
            dt, B, C = (
                F.rms_norm(widened(part), part.shape[-1:], eps=self.bcdt_norm_eps).to(part.dtype) for part in (dt, B, C)
            )
        dt = F.softplus(self.dt_proj(dt) + self.dt_bias)  # [B, T, width]
        dt, reset = ops.pass_through(mask, dt, reset)  # a step of length 0 neither decays nor writes
        y, memory = ops.selective_scan(
            u,
            dt,
            -self.A_log.exp(),
            B.unsqueeze(2),
            C.unsqueeze(2),
            self.D,
            negative_eigenvalues=self.negative_eigenvalues,
            reset=reset,
            state=memory,
        )
        return self.out_proj(y * F.silu(z)), (tail, memory)

    def init_state(self, batch, max_length, device, dtype):
        return self.conv.init_state(batch, device, dtype), empty_memory((batch, *self.A_log.shape), device, dtype)
