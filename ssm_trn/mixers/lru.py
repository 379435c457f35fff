"""LRU, the linear recurrent unit: complex eigenvalues inside the unit circle, the same at every step.

    lambda = exp(-exp(nu_log) + i exp(theta_log)),   gamma = exp(gamma_log)          N of them
    h_t = lambda h_{t-1} + gamma (B x_t)                                             h_t complex
    y_t = Re(C h_t) + D x_t
    out, gate = W_out gelu(y_t),   out * sigmoid(gate)

with complex matrices B and C. Orvieto et al. 2023 (arXiv:2303.06349), sections 3.3 and 3.4 and appendix A; the last
line is the block of S4, which the paper takes over (figure 1, "GLU").

N  d_state
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ssm_trn import ops
from ssm_trn.layers import complex_of, glu, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, require_positive


@register("lru")
class LRU(Mixer):
    """Options:
    d_state: N, complex numbers of the state; d_model by default.
    r_min, r_max: the ring of the initial eigenvalues, 0 <= r_min < r_max <= 1. Long memory needs r_min near 1.
    max_phase: their angles are uniform between 0 and this. Long memory needs small ones.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int | None = None,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
    ):
        super().__init__()
        require_positive(d_state=d_state, max_phase=max_phase)
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(f"r_min {r_min} and r_max {r_max} are no ring in the unit circle: 0 <= r_min < r_max <= 1")
        d_state = d_state or d_model
        self.ring, self.max_phase = (r_min, r_max), max_phase
        self.nu_log = nn.Parameter(torch.empty(d_state))
        self.theta_log = nn.Parameter(torch.empty(d_state))
        self.gamma_log = nn.Parameter(torch.empty(d_state))
        self.in_proj = nn.Linear(d_model, 2 * d_state, bias=False)  # Re B, Im B
        self.read_proj = nn.Linear(2 * d_state, d_model, bias=False)  # Re C, -Im C
        self.D = nn.Parameter(torch.empty(d_model))
        self.out_proj = nn.Linear(d_model, 2 * d_model, bias=False)

    def reset_parameters(self) -> None:
        smallest, largest = (r**2 for r in self.ring)
        # |lambda|^2 is uniform: lambda is then uniform in the ring (lemma 3.2). Uniform numbers may be 0: keep off it.
        squares = torch.empty_like(self.nu_log).uniform_(smallest, largest).clamp(1e-6, 1 - 1e-6)
        self.nu_log.data.copy_(torch.log(-0.5 * squares.log()))
        self.theta_log.data.uniform_(0, self.max_phase).clamp_(min=1e-6).log_()
        self.gamma_log.data.copy_(0.5 * torch.log1p(-squares))  # equation 7: h is then as large as its input
        nn.init.normal_(self.in_proj.weight, std=(2 * self.in_proj.in_features) ** -0.5)
        nn.init.normal_(self.read_proj.weight, std=(self.read_proj.in_features / 2) ** -0.5)
        nn.init.normal_(self.D)

    def forward(self, x, state=None, mask=None, reset=None):
        written = widened(self.in_proj(x)) * self.gamma_log.exp().repeat(2)
        h, memory = self.remember(written, state[0] if state is not None else None, mask, reset)
        y = self.read_proj(h.to(x.dtype)) + (self.D * x).to(x.dtype)
        return glu(self.out_proj(F.gelu(y))), (memory,)

    def remember(self, written, memory, mask, reset):
        """h for what is written, both [B, T, 2 N], and the last h, [B, N, 2]: real and imaginary parts."""
        # The scan reads twice the real part of C h from each of its states: h once with C = 1/2, once with C = -i/2 for
        # the imaginary part. Its input, 1, is real; what is written goes in as B.
        rates = complex_of(-self.nu_log.exp(), self.theta_log.exp())  # [N]
        half = torch.full_like(rates, 0.5)
        C = torch.cat([half, -1j * half])[:, None]  # [2 N, 1]
        B = complex_of(*written.chunk(2, dim=-1)).repeat(1, 1, 2)[..., None]  # [B, T, 2 N, 1]
        ones, B, reset = ops.pass_through(mask, torch.ones_like(written), B, reset)
        if memory is not None:
            memory = torch.view_as_complex(memory).repeat(1, 2)[..., None]  # [B, 2 N, 1]
        h, memory = ops.selective_scan(ones, ones, rates.repeat(2)[:, None], B, C, reset=reset, state=memory)
        return h, torch.view_as_real(memory[:, : len(rates), 0])

    def init_state(self, batch, max_length, device, dtype):
        return (empty_memory((batch, len(self.nu_log), 2), device, dtype),)
