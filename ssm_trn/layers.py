"""The parts that all models share: normalisation, the feed-forward layer, and parameters that stay in float32."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.ops.contexts import cast


def widened(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that already: the precision of norms, gates and states."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, computed in float32."""
    wide = widened(x)
    return cast(wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps), x.dtype)


def glu(x: Tensor) -> Tensor:
    """The first half of the last axis, gated by the second: F.glu by operators whose gradients XLA has too."""
    value, gate = x.chunk(2, dim=-1)
    return value * torch.sigmoid(gate)


def complex_of(real: Tensor, imaginary: Tensor) -> Tensor:
    """torch.complex by operators that XLA has too."""
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


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


def float32_parameters(model: nn.Module) -> set[str]:
    """The names of the parameters in a model that stay in float32."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, Float32Parameters)
        for name, _ in module.named_parameters(recurse=False)
    }


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
        wide = widened(x)
        if self.groups == 1:
            y = F.rms_norm(wide, wide.shape[-1:], self.weight, self.eps)
        else:
            parts = wide.unflatten(-1, (self.groups, -1))
            y = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        return cast(y, x.dtype)


class GroupNorm(Float32Parameters):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over each of `groups` parts of the last axis, in float32.

    Wu and He 2018 (arXiv:1803.08494), section 3.
    """

    def __init__(self, size: int, groups: int, eps: float = 1e-5):
        super().__init__()
        self.eps, self.groups = eps, groups
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = widened(x).unflatten(-1, (self.groups, -1))
        return (F.layer_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * self.weight + self.bias).to(x.dtype)


GATE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": partial(F.gelu, approximate="tanh")}


class GatedFeedForward(nn.Module):
    """y = W_out (f(W_gate x) * W_up x), the feed-forward layers of Shazeer 2020 (arXiv:2002.05202).

    `kind` "swiglu" has f = silu; "geglu" f = gelu, in its tanh approximation as the Gemma models have it.
    """

    def __init__(self, d_model: int, d_ff: int, kind: str = "swiglu", bias: bool = False):
        super().__init__()
        self.gate_function = GATE_FUNCTIONS[kind]
        self.gate_and_up = nn.Linear(d_model, 2 * d_ff, bias=bias)
        self.out_proj = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.out_proj(self.gate_function(gate) * up)


class ShortConv(Float32Parameters):
    """Causal depthwise convolution over the last `width` steps, with the tail of its input as state.

    `activation` follows it: "silu" or None.
    """

    def __init__(self, channels: int, width: int, bias: bool = True, activation: str | None = "silu"):
        super().__init__()
        self.activation = activation
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
        return ops.short_conv(
            x, self.weight, self.bias, mask=mask, reset=reset, state=state, activation=self.activation
        )


def previous_step(x: Tensor, state: Tensor | None, mask: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """x one step earlier: the token shift of RWKV.

    Args:
        x: [B, T, ...].
        state: x at the step before the first [B, 1, ...], or None for zeros.
        mask: bool [B, T], True at real tokens; masked steps are skipped, and what is returned for them means nothing.
        reset: bool [B, T]; before such a step there are zeros.

    Returns:
        x_{t-1} for each step t [B, T, ...], and x at the last real step [B, 1, ...], both in the dtype of x.
    """
    state = torch.zeros_like(x[:, :1]) if state is None else state.to(x.dtype)
    history = torch.cat([state, x], 1)  # [B, 1 + T, ...]
    if mask is not None:  # from each step the last real one through it; the state is always real
        real = F.pad(mask, (1, 0), value=True)
        index = torch.where(real, torch.arange(real.shape[1], device=x.device), 0).cummax(1).values
        history = history.take_along_dim(index.reshape(*index.shape, *(1,) * (x.dim() - 2)), 1)
    before, last = history[:, :-1], history[:, -1:]
    if reset is not None:
        before = before.masked_fill(reset.reshape(*reset.shape, *(1,) * (x.dim() - 2)), 0)
    return before, last.clone()  # a view would keep the whole history alive
