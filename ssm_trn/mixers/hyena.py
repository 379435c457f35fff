"""Hyena of order 2: gates around a convolution as long as the sequence, with a filter that a small network computes.

    q, k, v = causal convolution of W x
    y_t = q_t * (sum over s <= t of filter(t - s) k_s * v_s + D k_t * v_t)                       per channel
    filter(lag) = exp(-alpha lag / L) MLP(lag / L, cos and sin of 2 pi f_b lag / L)
    out = W_out y_t

with the MLP layers sin(frequency * (W z + b)), the last one linear, and rates alpha spread over the channels. Poli et
al. 2023 (arXiv:2302.10866), definition 3.1 and section 3.3, as its authors' code has it: of the two filters of order 2,
the one before the first gate is the short convolution.

This layer remembers all of k * v: its state grows with the context, and a step costs more with each token, as in
attention. The filter goes on for lags beyond L, but no training has shaped it there.

L  context_length
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn import ops
from ssm_trn.layers import Float32Parameters, ShortConv, widened
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer, empty_memory, require_positive
from ssm_trn.ops.contexts import full_precision

HIDDEN_LAYERS = 2


class ImplicitFilter(Float32Parameters):
    """The filter of each channel as a function of the lag: a network of sines behind a window that decays.

    Its parameters get no weight decay, as in the authors' code.
    """

    no_weight_decay = True

    def __init__(self, channels: int, context_length: int, width: int, bands: int, frequency: float):
        super().__init__()
        self.context_length, self.bands, self.initial_frequency = context_length, bands, frequency
        self.in_weight = nn.Parameter(torch.empty(width, 1 + 2 * bands))
        self.hidden_weight = nn.Parameter(torch.empty(HIDDEN_LAYERS, width, width))
        self.out_weight = nn.Parameter(torch.empty(channels, width))
        self.biases = nn.Parameter(torch.empty(1 + HIDDEN_LAYERS, width))
        self.frequency = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        for weight in (self.in_weight, self.hidden_weight, self.out_weight):
            nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(self.biases)
        nn.init.constant_(self.frequency, self.initial_frequency)

    def forward(self, length: int) -> Tensor:
        """The taps of all lags below length [length, channels]."""
        with full_precision(self.in_weight.device):
            time = torch.arange(length, device=self.in_weight.device, dtype=self.in_weight.dtype) / self.context_length
            z = F.linear(self.features(time), self.in_weight, self.biases[0])
            for weight, bias in zip(self.hidden_weight, self.biases[1:], strict=True):
                z = F.linear(torch.sin(self.frequency * z), weight, bias)
            return self.window(time) * F.linear(torch.sin(self.frequency * z), self.out_weight)

    def features(self, time: Tensor) -> Tensor:
        """What the network reads of times in units of the context, [T] -> [T, 1 + 2 bands]."""
        frequencies = torch.linspace(1e-4, self.bands - 1, self.bands, device=time.device, dtype=time.dtype)
        angles = 2 * math.pi * time[:, None] * frequencies
        return torch.cat([time[:, None], angles.cos(), -angles.sin()], -1)

    def window(self, time: Tensor) -> Tensor:
        """[T] -> [T, channels]: down to 0.01 after 0.3 of the context in the last channel, after 1.5 in the first."""
        slowest, fastest = -math.log(0.01) / 1.5, -math.log(0.01) / 0.3
        rates = torch.linspace(slowest, fastest, len(self.out_weight), device=time.device, dtype=time.dtype)
        return torch.exp(-time[:, None] * rates)


@register("hyena")
class Hyena(Mixer):
    """Options:
    context_length: L, over which the filter is spread: the length of the training sequences.
    filter_width: of the hidden layers of the filter's network.
    filter_bands: frequencies f_b that it sees of the lag, from 0 to filter_bands - 1.
    filter_frequency: initial frequency of its sines; the larger, the rougher the filter can become.
    conv_width: steps that the short convolution sees.
    """

    def __init__(
        self,
        d_model: int,
        context_length: int = 1024,
        filter_width: int = 64,
        filter_bands: int = 16,
        filter_frequency: float = 14.0,
        conv_width: int = 3,
    ):
        super().__init__()
        require_positive(
            context_length=context_length,
            filter_width=filter_width,
            filter_bands=filter_bands,
            filter_frequency=filter_frequency,
            conv_width=conv_width,
        )
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.conv = ShortConv(3 * d_model, conv_width, activation=None)
        self.filter = ImplicitFilter(d_model, context_length, filter_width, filter_bands, filter_frequency)
        self.D = nn.Parameter(torch.empty(d_model))
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.D)

    def forward(self, x, state=None, mask=None, reset=None):
        tail, past = state if state is not None else (None, None)
        convolved, tail = self.conv(self.in_proj(x), tail, mask, reset)
        q, k, v = widened(convolved).chunk(3, dim=-1)  # [B, T, d_model]
        slots = 0 if past is None else past.shape[1]
        kv = k * v
        y, history = ops.long_conv(kv, self.filter(slots + x.shape[1]), mask=mask, reset=reset, state=past)
        y = q * (y + self.D * kv)
        return self.out_proj(y.to(x.dtype)), (tail, history if past is None else newest(history, slots))

    def init_state(self, batch, max_length, device, dtype):
        past = empty_memory((batch, max_length, len(self.D)), device, dtype)
        return self.conv.init_state(batch, device, dtype), past


def newest(history: Tensor, slots: int) -> Tensor:
    """The last `slots` inputs of [B, S, D]; all of them if others hold something too, so that nothing is forgotten.

    Where the host may not look at them (anywhere but on a CPU or GPU), a state must be made for the whole length in
    advance, as `init_state` does.
    """
    may_look = history.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling()
    return history if may_look and history[:, :-slots].any() else history[:, -slots:]
