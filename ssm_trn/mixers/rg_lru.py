"""RG-LRU, the recurrent block of Griffin: a gated linear RNN with one number of state per channel.

    r_t = sigmoid(W_a u_t + b_a),   i_t = sigmoid(W_i u_t + b_i)
    a_t = exp(-c softplus(Lambda) r_t)                                  c = 8
    h_t = a_t h_{t-1} + m_t i_t u_t                                     m_t = sqrt(1 - a_t^2), but 1 at a first token
    out = W_out (h_t * gelu(W_y x_t + b_y)) + b_out

with u = causal convolution of W_x x + b_x. W_a and W_i are block-diagonal, a block for each head. De et al. 2024
(arXiv:2402.19427), sections 2.3 and 2.4; the paper's Lambda is minus this one. That m is 1 at the first token of a
document, where there is no memory to make room for, is what the authors' code has (RecurrentGemma, arXiv:2404.07839),
and so is the tanh form of gelu. The state therefore also says whether there was a token yet.

Griffin follows two of these by a layer of attention over a window of 1,024 tokens:
`layers: [rg_lru, rg_lru, {mixer: attention, n_kv_heads: 1, window: 1024}]`.

H  n_heads, K  head_dim (width of a block)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import Float32Parameters, ShortConv
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, inverse_softplus, require_positive

C = 8.0


class BlockDiagonalLinear(Float32Parameters):
    """y = W x + b with one block of W for each of n_heads parts of x: the product in the dtype of x, y in float32."""

    def __init__(self, n_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads, head_dim, head_dim))  # [H, in, out]
        self.bias = nn.Parameter(torch.empty(n_heads * head_dim))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)  # LeCun's, as section 2.4 asks
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, self.weight.shape[:2])  # [B, T, H, K]
        return torch.einsum("bthi,hij->bthj", parts, self.weight.to(x.dtype)).flatten(2) + self.bias


@register("rg_lru")
class RGLRU(Mixer):
    """Options:
    n_heads: H; by default as many of width 64 as d_model holds.
    head_dim: K; d_model / n_heads by default. The recurrence has H K channels (the paper: 4/3 d_model of them).
    conv_width: steps that the convolution sees.
    """

    def __init__(self, d_model: int, n_heads: int | None = None, head_dim: int | None = None, conv_width: int = 4):
        super().__init__()
        require_positive(conv_width=conv_width)
        self.n_heads, self.head_dim = n_heads, head_dim = heads_of(d_model, n_heads, head_dim)
        width = n_heads * head_dim
        self.in_proj = nn.Linear(d_model, 2 * width)
        self.conv = ShortConv(width, conv_width, activation=None)
        self.input_gate = BlockDiagonalLinear(n_heads, head_dim)
        self.recurrence_gate = BlockDiagonalLinear(n_heads, head_dim)
        self.Lambda = nn.Parameter(torch.empty(width))
        self.out_proj = nn.Linear(width, d_model)

    def reset_parameters(self) -> None:
        slowest = torch.empty_like(self.Lambda).uniform_(0.9, 0.999)  # a_t where r_t = 1, section 2.4
        self.Lambda.data.copy_(inverse_softplus(-slowest.log() / C))

    def forward(self, x, state=None, mask=None, reset=None):
        tail, started, memory = state if state is not None else (None, None, None)
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u, tail = self.conv(u, tail, mask, reset)
        rate = -C * F.softplus(self.Lambda)
        r = torch.sigmoid(self.recurrence_gate(u))  # [B, T, H K]
        first, started = self.first_tokens(x, started, mask, reset)
        # expm1 keeps the digits of 1 - a^2 for a near 1; a square root of 0 would have no gradient.
        m = torch.sqrt((-torch.expm1(2 * rate * r)).clamp_min(torch.finfo(r.dtype).tiny))
        m = m.masked_fill(first[..., None], 1.0)
        written = (m * torch.sigmoid(self.input_gate(u)) * u).to(x.dtype)
        written, r, reset = ops.pass_through(mask, written, r, reset)
        h, memory = ops.selective_scan(written, r, rate[:, None], scale_input=False, reset=reset, state=memory)
        return self.out_proj(h * F.gelu(z, approximate="tanh")), (tail, started, memory)

    def first_tokens(self, x: Tensor, started: Tensor | None, mask: Tensor | None, reset: Tensor | None):
        """Where nothing came before, bool [B, T]; and, as the new state, whether there was a token in each row [B]."""
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        first = real.cumsum(1, dtype=torch.int64) == 1
        if started is not None:
            first = first & ~started[:, None]
        if reset is not None:
            first = first | reset
        now = real.any(1)
        return first, now if started is None else now | started

    def init_state(self, batch, max_length, device, dtype):
        started = torch.zeros(batch, dtype=torch.bool, device=device)
        memory = empty_memory((batch, *self.Lambda.shape, 1), device, dtype)
        return self.conv.init_state(batch, device, dtype), started, memory

    def state_size(self, context_length: int) -> int:
        return self.conv.weight.numel()  # for each channel conv_width - 1 inputs and h
