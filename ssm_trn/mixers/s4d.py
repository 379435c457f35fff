"""S4D: a state-space model with N diagonal states for each channel, the same at every step.

    h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A u_t         per channel and state, complex
    y_t = 2 Re(sum over n of C_n h_tn) + D u_t
    out, gate = W_out gelu(y_t),   out * sigmoid(gate)

with u = x. Gu et al. 2022 (arXiv:2206.11893), sections 3 and 4: zero-order hold, B = 1 (only its product with C counts)
and the initial A of S4D-Lin, S4D-Inv or S4D-Real. The last line is the block of S4 (arXiv:2111.00396).

As nothing depends on the input, y is also a convolution (section 3.2): so are several steps computed at once, and a
single step by the recurrence. A complex state stands for itself and its conjugate, hence 2 Re.

N  d_state / 2 (S4D-Real: d_state, all real, without the 2)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import complex_of, glu, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, require_positive
from ssm_trn.ops.backends import require_complex
from ssm_trn.ops.contexts import full_precision
from ssm_trn.ops.masking import delete_masked


@register("s4d")
class S4D(Mixer):
    """Options:
    d_state: real numbers of the state of each channel; even, unless init is real.
    init: of A. lin: A_n = -1/2 + i pi n; inv: A_n = -1/2 + i d/pi (d/(2n + 1) - 1) with d = d_state;
        real: A_n = -(n + 1).
    """

    def __init__(self, d_model: int, d_state: int = 64, init: str = "lin"):
        super().__init__()
        require_positive(d_state=d_state)
        if init not in ("lin", "inv", "real"):
            raise ValueError(f"unknown init '{init}': choose one of lin, inv, real")
        if init != "real" and d_state % 2:
            raise ValueError(f"d_state {d_state} is odd: complex states come in pairs, or choose init: real")
        self.init, self.d_state = init, d_state
        shape = (d_model, d_state if init == "real" else d_state // 2)
        self.dt_log = nn.Parameter(torch.empty(d_model))
        self.A_log = nn.Parameter(torch.empty(shape))  # of minus the real part
        self.A_imag = None if init == "real" else nn.Parameter(torch.empty(shape))
        self.C = nn.Parameter(torch.empty(shape if init == "real" else (*shape, 2)))
        self.D = nn.Parameter(torch.empty(d_model))
        self.out_proj = nn.Linear(d_model, 2 * d_model, bias=False)

    def reset_parameters(self) -> None:
        n = torch.arange(self.A_log.shape[1], dtype=self.A_log.dtype, device=self.A_log.device)
        nn.init.uniform_(self.dt_log, math.log(1e-3), math.log(1e-1))
        if self.A_imag is None:
            self.A_log.data.copy_((n + 1).log().expand_as(self.A_log))
        else:
            nn.init.constant_(self.A_log, math.log(0.5))
            inverse = self.d_state / math.pi * (self.d_state / (2 * n + 1) - 1)
            self.A_imag.data.copy_((math.pi * n if self.init == "lin" else inverse).expand_as(self.A_imag))
        nn.init.normal_(self.C, std=1.0 if self.A_imag is None else 0.5**0.5)  # of variance 1, also if complex
        nn.init.normal_(self.D)

    def forward(self, x, state=None, mask=None, reset=None):
        (memory,) = state if state is not None else (None,)
        if memory is not None and self.A_imag is not None:
            memory = torch.view_as_complex(memory)
        with full_precision(x.device):
            y, memory = (self.recur if x.shape[1] == 1 else self.convolve)(x, memory, mask, reset)
        memory = torch.view_as_real(memory) if memory.is_complex() else memory
        return glu(self.out_proj(F.gelu(y.to(x.dtype)))), (memory,)

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dt [D], and A, B after zero-order hold and C [D, N]."""
        dt, A, C = self.dt_log.exp(), -self.A_log.exp(), self.C
        if self.A_imag is not None:
            require_complex(A.device)
            A, C = complex_of(A, self.A_imag), torch.view_as_complex(C)
        return dt, A, torch.expm1(dt[:, None] * A) / A, C

    def recur(self, u, memory, mask, reset):
        """y [B, T, D] and the last h [B, D, N], step by step."""
        dt, A, B, C = self.system()
        u, dt, reset = ops.pass_through(mask, u, dt.expand(u.shape), reset)
        return ops.selective_scan(u, dt, A, B, C, self.D, scale_input=False, reset=reset, state=memory)

    def convolve(self, u, memory, mask, reset):
        """The same for all steps at once: y as a convolution, h as a sum over lags."""
        dt, A, B, C = self.system()
        rate, read = dt[:, None] * A, 2 * C if C.is_complex() else C
        u, length, place = widened(u), u.shape[1], None
        count = u.new_full((len(u), 1), length) if mask is None else mask.sum(1, keepdim=True)
        if mask is not None:  # from here on, the real steps of each row come first, `count` of them
            u, reset, place = delete_masked(u, reset, mask)
        y, _ = ops.long_conv(u, decaying(read * B, rate, length).T, reset=reset)
        document = None if reset is None else reset.cumsum(1, dtype=torch.int64)  # [B, T]
        last = B * decayed_sum(newest_first(u, count, document), rate)
        if memory is not None:
            heard = decaying(read * rate.exp() * memory, rate, length).mT  # [B, T, D]
            kept = (count[..., None] * rate).exp() * memory
            if document is not None:
                heard = heard.masked_fill((document > 0)[..., None], 0)
                kept = kept.masked_fill((document[:, -1] > 0)[:, None, None], 0)
            y, last = y + heard, last + kept
        y = y + self.D * u
        return y if place is None else y.gather(1, place[..., None].expand_as(y)), last

    def init_state(self, batch, max_length, device, dtype):
        return (empty_memory((batch, *self.C.shape), device, dtype),)


def newest_first(u: Tensor, count: Tensor, document: Tensor | None) -> Tensor:
    """u [B, T, D] by lag from the last of the first `count` [B, 1] steps; zeros for other documents than the last."""
    if document is not None:
        u = u.masked_fill((document != document[:, -1:])[..., None], 0)
    lags = torch.arange(u.shape[1], device=u.device)
    index = (count.long() - 1 - lags).remainder(u.shape[1])  # behind the last lag: the zeros of deleted steps
    return u.gather(1, index[..., None].expand_as(u))


# Powers of a decay are split as exp(lag rate) = exp(J i rate) exp(j rate), lag = J i + j: that needs about 2 sqrt(T)
# exponentials for T lags, and matrix products do the rest. Complex numbers enter these as real and imaginary parts.


def decaying(weights: Tensor, rate: Tensor, length: int) -> Tensor:
    """The real part of the sum over n of weights_n exp(lag rate_n), for all lags below length.

    weights [..., D, N] and rate [D, N], both complex or both real -> [..., D, length].
    """
    coarse, fine = _powers(rate, length)
    # Re(a b) is the scalar product of conj(a) and b as vectors.
    weighted = (weights[..., None] * coarse).conj()  # [..., D, N, I]
    return (_parts(weighted).mT @ _parts(fine)).flatten(-2)[..., :length]


def decayed_sum(u: Tensor, rate: Tensor) -> Tensor:
    """The sum over lags of exp(lag rate_n) u_lag: u [B, T, D], the newest first, and rate [D, N] -> [B, D, N]."""
    coarse, fine = _powers(rate, u.shape[1])
    count, width = coarse.shape[-1], fine.shape[-1]
    u = F.pad(u.mT, (0, count * width - u.shape[1])).unflatten(-1, (count, width))  # [B, D, I, J]
    sums = u @ _parts(fine).mT
    if rate.is_complex():
        sums = complex_of(*sums.chunk(2, dim=-1))
    return (sums * coarse.mT).sum(-2)


def _powers(rate: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """exp(width i rate) [D, N, I] and exp(j rate) [D, N, J], width = J."""
    width = math.isqrt(length - 1) + 1
    steps = torch.arange(width, device=rate.device, dtype=rate.real.dtype)
    coarse = width * steps[: -(-length // width)]
    return torch.exp(rate[..., None] * coarse), torch.exp(rate[..., None] * steps)


def _parts(x: Tensor) -> Tensor:
    """[..., N, J] -> [..., 2 N, J], if it is complex."""
    return torch.cat([x.real, x.imag], -2) if x.is_complex() else x
