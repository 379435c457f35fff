"""mLSTM, the matrix memory of xLSTM: an exponential input gate, and an output divided by what was written.

    m_t = max(log f_t + m_{t-1}, i_t)                           the largest weight so far, as a logarithm; per head
    C_t = exp(log f_t + m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) k_t v_t^T
    n_t = exp(log f_t + m_{t-1} - m_t) n_{t-1} + exp(i_t - m_t) k_t
    h_t = C_t^T q_t / max(|n_t^T q_t|, exp(-m_t)),  with q_t / sqrt(K) for q_t
    out = W_out (LayerNorm_h(h_t) * sigmoid(z_t))

with q, k, v, z = W x, i_t = cap(W_i x_t + b_i), f_t = sigmoid(cap(W_f x_t + b_f)) and cap(a) = c tanh(a / c). Beck et
al. 2024 (arXiv:2405.04517), equations 19 to 27; the layer, the soft caps and the initial gates are those of xLSTM 7B,
Beck et al. 2025 (arXiv:2503.13427), section 3. It is `linear_attention` with n as one more column of values.

C exp(m), n exp(m) and h do not depend on m, which starts at 0 and only keeps all numbers in range: so no gradient
passes through it.

H  n_heads, K  head_dim (of keys), V  value_head_dim, c  gate_soft_cap
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, heads_of, require_positive

EPS = 1e-6  # of the norm, and added to the divisor

State = tuple[Tensor, Tensor]


@register("mlstm")
class MLSTM(Mixer):
    """Options:
    n_heads: H; by default as many of value width 64 as d_model holds.
    head_dim: K; half of value_head_dim by default.
    value_head_dim: V; d_model / n_heads by default.
    gate_soft_cap: c, bound of the gates before their exponentials; None: no bound, as in the paper of 2024.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        gate_soft_cap: float | None = 15.0,
    ):
        super().__init__()
        require_positive(head_dim=head_dim, gate_soft_cap=gate_soft_cap)
        self.n_heads, self.value_head_dim = heads_of(d_model, n_heads, value_head_dim)
        self.head_dim = head_dim or max(1, self.value_head_dim // 2)
        self.gate_soft_cap = gate_soft_cap
        key_width, value_width = self.n_heads * self.head_dim, self.n_heads * self.value_head_dim
        self.splits = [key_width, key_width, value_width, value_width]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.gate_proj = nn.Linear(d_model, 2 * self.n_heads, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(2 * self.n_heads))
        self.norm_weight = nn.Parameter(torch.empty(value_width))
        self.out_proj = nn.Linear(value_width, d_model, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate_proj.weight)
        write, forget = self.gate_bias.data.chunk(2)
        write.fill_(-10.0)
        forget.copy_(torch.linspace(3.0, 6.0, self.n_heads))
        nn.init.ones_(self.norm_weight)

    def forward(self, x, state=None, mask=None, reset=None):
        q, k, v, z = self.in_proj(x).split(self.splits, dim=-1)
        q, k = (rearrange(part, "b t (h k) -> b t h k", k=self.head_dim) for part in (q, k))
        v = rearrange(v, "b t (h v) -> b t h v", v=self.value_head_dim)
        gates = self.gate_proj(x) + self.gate_bias
        if self.gate_soft_cap is not None:
            gates = self.gate_soft_cap * torch.tanh(gates / self.gate_soft_cap)
        write, forget = gates.chunk(2, dim=-1)  # [B, T, H]
        k, v, log_forget, reset = ops.pass_through(mask, k, v, F.logsigmoid(forget), reset)
        if mask is not None:
            write = write.masked_fill(~mask[..., None], -torch.inf)
        h, state = read_memory(q, k, v, write, log_forget, reset, state)
        h = F.layer_norm(h, h.shape[-1:], eps=EPS).flatten(2) * self.norm_weight
        return self.out_proj(h.to(x.dtype) * torch.sigmoid(z)), state

    def init_state(self, batch, max_length, device, dtype):
        memory = empty_memory((batch, self.n_heads, self.head_dim, self.value_head_dim + 1), device, dtype)
        return memory, empty_memory((batch, self.n_heads), device, dtype)


def read_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_forget: Tensor,
    reset: Tensor | None = None,
    state: State | None = None,
) -> tuple[Tensor, State]:
    """h for q, k [B, T, H, K], v [B, T, H, V] and the logarithms of the gates, i and log f <= 0, [B, T, H].

    Returns:
        h [B, T, H, V], in float32 or better, and the state: C with n as its last column [B, H, K, V + 1], and m [B, H].
    """
    memory, largest = state if state is not None else (None, torch.zeros_like(write[:, 0]))
    with torch.no_grad():
        m = running_max(write, log_forget, reset, largest)  # [B, T, H]
        before = torch.cat([largest[:, None], m[:, :-1]], 1)
        if reset is not None:
            before = before.masked_fill(reset[..., None], 0)
    log_decay = log_forget + (before - m)  # <= 0 but for rounding; this order keeps the digits of a weak decay
    gate = torch.exp(write - m)[..., None]
    values = torch.cat([gate * v, gate], -1)  # [B, T, H, V + 1]
    y, memory = ops.linear_attention(q, k, values, log_decay, reset=reset, state=memory, scale=q.shape[-1] ** -0.5)
    read, n = y.split([v.shape[-1], 1], dim=-1)
    divisor = torch.maximum(n.abs(), torch.exp(-m)[..., None]) + EPS
    return read * divisor.reciprocal(), (memory, m[:, -1].clone())  # a division has a dearer gradient


def running_max(x: Tensor, log_decay: Tensor, reset: Tensor | None, initial: Tensor) -> Tensor:
    """m_t = max(m_{t-1} + log_decay_t, x_t), with 0 for m_{t-1} at a reset; x, log_decay [B, T, H], initial m [B, H].

    Spans of 1, 2, 4, ... steps are joined to longer ones: the sums are of neighbouring decays alone, never a difference
    of two sums that began at the first step.
    """
    if reset is not None:
        reset = reset[..., None]
        x = torch.where(reset, torch.maximum(x, log_decay), x)
        log_decay = log_decay.masked_fill(reset, -torch.inf)
    span = 1
    while span < x.shape[1]:
        x = torch.cat([x[:, :span], torch.maximum(x[:, span:], x[:, :-span] + log_decay[:, span:])], 1)
        log_decay = torch.cat([log_decay[:, :span], log_decay[:, :-span] + log_decay[:, span:]], 1)
        span *= 2
    return torch.maximum(x, log_decay + initial[:, None])
