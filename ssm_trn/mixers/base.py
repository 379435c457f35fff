"""What every mixer has in common."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ssm_trn.layers import Float32Parameters


class Mixer(Float32Parameters):
    """A layer that mixes along time: [B, T, d_model] -> [B, T, d_model], with a state for what came before.

    A subclass is made by `Mixer(d_model, **options)` and defines `forward` and `init_state`. What its paper asks of the
    initial weights it does in `reset_parameters`, which runs after all Linear layers were drawn. The projection that
    writes to the residual stream is called `out_proj`. Parameters held by the mixer itself stay float32.
    """

    def forward(self, x: Tensor, state=None, mask: Tensor | None = None, reset: Tensor | None = None):
        """x [B, T, d_model], a state or None, mask and reset bool [B, T] -> (y [B, T, d_model], the new state)."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def init_state(self, batch: int, max_length: int, device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The state before the first of max_length tokens: a tuple of tensors, batch first."""
        raise NotImplementedError(f"{type(self).__name__} does not define init_state")

    def state_size(self, context_length: int) -> int:
        """Numbers that one sequence has to remember after context_length tokens."""
        return sum(part.numel() for part in self.init_state(1, context_length, "meta", torch.float32))


def require_positive(**options: float | None) -> None:
    """A ValueError if one of the options is neither None nor above 0."""
    for name, value in options.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; it must be positive")


def width_of(d_model: int, expand: float) -> int:
    """expand * d_model, the inner width of a mixer."""
    width = int(expand * d_model)
    if width < 1:
        raise ValueError(f"expand {expand} leaves nothing of d_model {d_model}: choose a larger one")
    return width


def heads_of(d_model: int, n_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """n_heads and head_dim; by default as many heads of width 64 as d_model holds, and heads that fill it."""
    require_positive(n_heads=n_heads, head_dim=head_dim)
    n_heads = n_heads or max(1, d_model // 64)
    if head_dim is None and d_model % n_heads:
        raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}: change one or give head_dim")
    return n_heads, head_dim or d_model // n_heads


def empty_memory(shape: Sequence[int], device, dtype: torch.dtype) -> Tensor:
    """A recurrent state before anything was written: zeros, in float32 or better whatever the activations are."""
    return torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))


def init_time_step_(dt_bias: Tensor, shortest: float = 1e-3, longest: float = 1e-1) -> None:
    """Fills dt_bias so that softplus(dt_bias) is log-uniform in [shortest, longest] (Gu and Dao 2023, section 3.6)."""
    dt = torch.empty_like(dt_bias).uniform_(math.log(shortest), math.log(longest)).exp()
    dt_bias.data.copy_(inverse_softplus(dt))


def inverse_softplus(x: Tensor) -> Tensor:
    """log(exp(x) - 1), for x > 0."""
    return x + torch.log(-torch.expm1(-x))


def init_decay_rate_(A_log: Tensor, slowest: float = 1.0, fastest: float = 16.0) -> None:
    """Fills A_log with log A, A uniform in [slowest, fastest] (Dao and Gu 2024, section 9)."""
    nn.init.uniform_(A_log, slowest, fastest)
    A_log.data.log_()
