"""The parts that all models share: normalisation, the feed-forward layer, and parameters that stay in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn import ops


def widened(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that already: the precision of norms, gates and states."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, computed in float32."""
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class Float32Parameters(nn.Module):
    """A module whose own parameters (not those of its children) are never made in, nor cast to, less than float32.

    `model.bfloat16()` then leaves A_log, dt_bias, D and norm weights alone: in bfloat16 a decay of 0.999 would be 1.
    `reset_parameters` draws these parameters anew.
    """

    def reset_parameters(self) -> None:
        """Nothing by default."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.is_floating_point() and param.dtype.itemsize < 4:
            param = nn.Parameter(param.detach().float(), param.requires_grad)  # made under a narrow default dtype
        super().register_parameter(name, param)

    def _apply(self, fn, recurse=True):
        own = {id(tensor) for parameter in self.parameters(recurse=False) for tensor in (parameter, parameter.grad)}

        def keep_wide(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            narrower = out.is_floating_point() and out.dtype.itemsize < 4
            return tensor.to(out.device) if id(tensor) in own and narrower else out

        return super()._apply(keep_wide, recurse)


class RMSNorm(Float32Parameters):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 (Zhang and Sennrich 2019, equation 4).

    With groups > 1 the last axis is cut into so many parts, each with a mean of its own.
    """

    def __init__(self, size: int, eps: float = 1e-5, groups: int = 1):
        super().__init__()
        self.eps, self.groups = eps, groups
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        parts = widened(x).unflatten(-1, (self.groups, -1))
        return (F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """y = W_out (silu(W_gate x) * W_up x), the feed-forward layer of Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_and_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.out_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.out_proj(F.silu(gate) * up)


class ShortConv(Float32Parameters):
    """Causal depthwise convolution over the last `width` steps, then SiLU, with the tail of its input as state."""

    def __init__(self, channels: int, width: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def init_state(self, batch: int, device, dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch, self.weight.shape[1] - 1, self.weight.shape[0], device=device, dtype=dtype)

    def forward(self, x: Tensor, state: Tensor | None, mask: Tensor | None, reset: Tensor | None):
        """x [B, T, channels] -> (y [B, T, channels], state [B, width - 1, channels])."""
        return ops.short_conv(x, self.weight, self.bias, mask=mask, reset=reset, state=state, activation="silu")
