"""The ops beside other implementations: forward and backward pass with the gradients of all inputs, in float32."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn import ops
from ssm_trn.bench import peers
from ssm_trn.bench.measure import OURS, Comparison, Side, Target
from ssm_trn.mixers.mlstm import read_memory


def both_passes(
    functions: dict[str, Callable[..., Tensor]], inputs: Sequence[Tensor], shape: Sequence[int]
) -> dict[str, Side]:
    """Sides that return the output, of the given shape, and the gradients of all inputs."""
    inputs = [x.requires_grad_() for x in inputs]
    grad = torch.randn(*shape)

    def side(function: Callable[..., Tensor]) -> Side:
        def call() -> tuple[Tensor, ...]:
            output = function(*inputs)
            return output.detach(), *torch.autograd.grad(output, inputs, grad)

        return Side(call)

    return {name: side(function) for name, function in functions.items()}


def time_steps(*shape: int) -> Tensor:
    """Step sizes as Mamba draws them: log-uniform between 0.001 and 0.1."""
    return torch.empty(*shape).uniform_(math.log(1e-3), math.log(1e-1)).exp()


def selective_scan(
    peer: str, function: Callable[..., Tensor], channels: int, length: int, states: int = 16
) -> dict[str, Side]:
    def ours(x, dt, A, B, C, D):
        return ops.selective_scan(x, dt, A, B[:, :, None], C[:, :, None], D)[0]

    x, dt = torch.randn(1, length, channels), time_steps(1, length, channels)
    A = -torch.arange(1.0, states + 1).repeat(channels, 1)
    B, C = torch.randn(2, 1, length, states)
    inputs = x, dt, A, B, C, torch.ones(channels)
    return both_passes({OURS: ours, peer: function}, inputs, x.shape)


def ssd(length: int, heads: int = 24, channels: int = 64, states: int = 128) -> dict[str, Side]:
    def ours(x, dt, A, B, C):
        return ops.linear_attention(C, B, dt[..., None] * x, dt * A)[0]

    x, dt = torch.randn(1, length, heads, channels), time_steps(1, length, heads)
    B, C = torch.randn(2, 1, length, 1, states)
    inputs = x, dt, -torch.empty(heads).uniform_(1, 16), B, C
    return both_passes({OURS: ours, "transformers": peers.transformers_ssd}, inputs, x.shape)


def gla(length: int, heads: int = 12, channels: int = 64) -> dict[str, Side]:
    def ours(q, k, v, log_decay):
        return ops.linear_attention(q, k, v, log_decay)[0]

    q, k, v, gate = torch.randn(4, 1, length, heads, channels)
    inputs = q, k, v, F.logsigmoid(gate) / 16
    return both_passes({OURS: ours, "recurrent loop": peers.recurrent_gla}, inputs, v.shape)


def gated_delta_rule(length: int, heads: int = 12, channels: int = 64) -> dict[str, Side]:
    def ours(q, k, v, beta, log_decay):
        return ops.delta_rule(q, k, v, beta, log_decay, scale=channels**-0.5)[0]

    q, k, v = torch.randn(3, 1, length, heads, channels)
    beta = torch.randn(1, length, heads).sigmoid()
    log_decay = -torch.empty(heads).uniform_(1, 16) * time_steps(1, length, heads)
    inputs = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, log_decay
    return both_passes({OURS: ours, "transformers": peers.transformers_gated_delta_rule}, inputs, v.shape)


def mlstm(length: int, heads: int = 12, channels: int = 64) -> dict[str, Side]:
    def ours(q, k, v, write, forget):
        return F.layer_norm(read_memory(q, k, v, write, F.logsigmoid(forget))[0], (channels,))

    def peer(*inputs):
        # Its backward pass leaves the divisor of h out. The norm behind it, which each mLSTM has, makes that right.
        return F.layer_norm(peers.mlstm_kernels_chunkwise(*inputs), (channels,))

    q, k, v = torch.randn(3, 1, length, heads, channels)
    write, forget = torch.randn(2, 1, length, heads)
    return both_passes({OURS: ours, "mlstm_kernels": peer}, (q, k, v, write, forget + 3), v.shape)


def short_conv(length: int, channels: int = 1536, taps: int = 4) -> dict[str, Side]:
    def ours(x, weight, bias):
        return ops.short_conv(x, weight, bias, activation="silu")[0]

    x = torch.randn(1, length, channels)
    inputs = x, torch.randn(channels, taps), torch.randn(channels)
    return both_passes({OURS: ours, "F.conv1d": peers.conv1d_silu}, inputs, x.shape)


OPS = {
    "selective_scan": Comparison(
        partial(selective_scan, "mambapy", peers.mambapy_selective_scan, 1536),
        length=2048,
        rounds=7,
        targets=(
            Target("selective scan, 1536 channels of 16 states", "mambapy", 4),
            Target("the same, peak extra memory", "mambapy", 15, quantity="bytes"),
        ),
    ),
    "selective_scan_default": Comparison(
        partial(selective_scan, "transformers", peers.transformers_selective_scan, 768),
        length=512,
        rounds=3,
        targets=(Target("selective scan, 768 channels of 16 states", "transformers", 50),),
    ),
    "ssd": Comparison(
        ssd,
        length=2048,
        rounds=7,
        targets=(
            Target("SSD, 24 heads of 64 x 128", "transformers", 3.5),
            Target("the same, peak extra memory", "transformers", 6, quantity="bytes"),
        ),
    ),
    "gla": Comparison(gla, length=512, rounds=7, targets=(Target("GLA, 12 heads of 64 x 64", "recurrent loop", 4),)),
    "gated_delta_rule": Comparison(
        gated_delta_rule,
        length=2048,
        rounds=7,
        targets=(Target("gated delta rule, 12 heads of 64 x 64", "transformers", 1.5),),
    ),
    "gated_delta_rule_long": Comparison(
        gated_delta_rule,
        length=8192,
        rounds=3,
        targets=(Target("gated delta rule, 12 heads of 64 x 64", "transformers", 4),),
    ),
    "mlstm": Comparison(
        mlstm,
        length=2048,
        rounds=7,
        targets=(Target("mLSTM with norm, 12 heads of 64 x 64", "mlstm_kernels", 0.85),),
    ),
    "short_conv": Comparison(
        short_conv,
        length=2048,
        rounds=9,
        targets=(Target("short convolution with SiLU, 4 taps, 1536 channels", "F.conv1d", 2.5),),
    ),
}
