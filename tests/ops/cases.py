"""Every op with every option, as cases that one property suite runs through.

A case makes random inputs of any length and calls its op. Names of inputs that are weights, without a time axis, are in
`weights`; all others are [B, T, ...].
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn import ops

Inputs = dict[str, Tensor]
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Small sizes that are all different, so that no two axes can be mistaken for each other."""

    batch: int = 2
    heads: int = 4
    keys: int = 6
    values: int = 5


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Callable[..., Tensor], int, Sizes], Inputs]
    op: Callable
    options: dict = field(default_factory=dict)
    weights: tuple[str, ...] = ()

    def inputs(self, length: int, dtype=torch.float64, seed: int = 0, sizes: Sizes | None = None) -> Inputs:
        """Random inputs; the weights are always the same."""
        sizes = sizes or Sizes()
        weights = self.make(_normal(0, dtype), 1, sizes)
        random = self.make(_normal(seed, dtype), length, sizes)
        return {name: weights[name] if name in self.weights else x for name, x in random.items()}

    def state(self, dtype=torch.float64, sizes: Sizes | None = None) -> State:
        """A state as it really arises: after some steps of other inputs."""
        with torch.no_grad():
            return self(self.inputs(5, dtype, seed=1000, sizes=sizes))[1]

    @property
    def reads_before_decay(self) -> bool:
        """Step t reads or erases the state before step t decays it (RWKV)."""
        return "bonus" in self.name or "erase" in self.name

    def __call__(self, inputs: Inputs, state: State | None = None, **options) -> tuple[Tensor, State]:
        """(out, state); the state as a tuple of tensors, whatever the op."""
        inputs, options = dict(inputs), {**self.options, **options}
        if "a" in inputs:
            options["erase"] = inputs.pop("a"), inputs.pop("b")
        if self.op is ops.attention:
            return self.op(**inputs, cache=state, **options)
        out, state = self.op(**inputs, state=None if state is None else state[0], **options)
        return out, (state,)

    def during(self, inputs: Inputs, start: int, stop: int | None) -> Inputs:
        """The inputs of some of the steps."""
        return {name: x if name in self.weights else x[:, start:stop] for name, x in inputs.items()}


def _normal(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, complex: bool = False) -> Tensor:
        if complex:
            precision = torch.promote_types(dtype, torch.float32)
            return torch.randn(shape, generator=generator, dtype=torch.complex128).to(precision.to_complex())
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal


def _decay(x: Tensor) -> Tensor:
    """Log decays from weak to strong, as trained models have them."""
    return -2 * F.softplus(2 * x - 2)


def _linear_attention(decay: str | None = None, groups: bool = False, bonus: bool = False):
    def make(normal, length: int, s: Sizes) -> Inputs:
        key_heads = s.heads // 2 if groups else s.heads
        inputs = {name: normal(s.batch, length, key_heads, s.keys) for name in ("q", "k")}
        inputs["v"] = normal(s.batch, length, s.heads, s.values)
        if decay:
            shape = (s.heads,) if decay == "head" else (s.heads, s.keys)
            inputs["log_decay"] = _decay(normal(s.batch, length, *shape))
        if bonus:
            inputs["bonus"] = normal(s.heads, s.keys)
        return inputs

    return make


def _delta_rule(decay: str | None = None, groups: bool = False, erase: bool = False, largest_beta: float = 1.0):
    plain = _linear_attention(decay, groups)

    def make(normal, length: int, s: Sizes) -> Inputs:
        inputs = plain(normal, length, s)
        inputs["k"] = F.normalize(inputs["k"], dim=-1)
        if erase:
            inputs["a"] = F.normalize(normal(s.batch, length, s.heads, s.keys), dim=-1)
            inputs["b"] = inputs["a"] * torch.sigmoid(normal(s.batch, length, s.heads, s.keys))
        else:
            inputs["beta"] = largest_beta * torch.sigmoid(normal(s.batch, length, s.heads))
        return inputs

    return make


def _selective_scan(groups: int = 1, skip: bool = False, fixed: bool = False, complex: bool = False):
    def make(normal, length: int, s: Sizes) -> Inputs:
        channels, states = s.heads * 2, s.keys
        inputs = {"x": normal(s.batch, length, channels), "dt": F.softplus(normal(s.batch, length, channels) - 1)}
        rate = normal(channels, states, complex=complex)
        inputs["A"] = torch.complex(-torch.exp(rate.real), 3 * rate.imag) if complex else -torch.exp(rate)
        shape = (channels, states) if fixed else (s.batch, length, groups, states)
        inputs |= {name: normal(*shape, complex=complex) for name in ("B", "C")}
        if skip:
            inputs["D"] = normal(channels)
        return inputs

    return make


def _gated_rnn(normal, length: int, s: Sizes) -> Inputs:
    channels = s.heads * 2
    dt = F.softplus(normal(s.batch, length, channels))
    return {"x": normal(s.batch, length, channels), "dt": dt, "A": -torch.exp(normal(channels, 1))}


def _short_conv(taps: int, bias: bool):
    def make(normal, length: int, s: Sizes) -> Inputs:
        inputs = {"x": normal(s.batch, length, s.keys), "weight": normal(s.keys, taps)}
        return inputs | {"bias": normal(s.keys)} if bias else inputs

    return make


def _long_conv(normal, length: int, s: Sizes) -> Inputs:
    return {"x": normal(s.batch, length, s.keys), "kernel": normal(340, s.keys) / 8}


def _attention(normal, length: int, s: Sizes, groups: bool = False) -> Inputs:
    key_heads = s.heads // 2 if groups else s.heads
    return {
        "q": normal(s.batch, length, s.heads, s.keys),
        "k": normal(s.batch, length, key_heads, s.keys),
        "v": normal(s.batch, length, key_heads, s.values),
    }


def _grouped_attention(normal, length: int, s: Sizes) -> Inputs:
    return _attention(normal, length, s, groups=True)


LINEAR, DELTA, SCAN, CONV, LONG_CONV, ATTENTION = (
    ops.linear_attention,
    ops.delta_rule,
    ops.selective_scan,
    ops.short_conv,
    ops.long_conv,
    ops.attention,
)
SCAN_WEIGHTS = ("A", "D")
FIXED_SCAN_WEIGHTS = ("A", "B", "C", "D")
CONV_WEIGHTS = ("weight", "bias")

CASES = (
    Case("linear_attention", _linear_attention(), LINEAR),
    Case("linear_attention-head", _linear_attention("head"), LINEAR, {"scale": 0.5}),
    Case("linear_attention-head-groups", _linear_attention("head", groups=True), LINEAR),
    Case("linear_attention-channel", _linear_attention("channel"), LINEAR, {"scale": 0.5}),
    Case("linear_attention-channel-groups", _linear_attention("channel", groups=True), LINEAR),
    Case("linear_attention-head-bonus", _linear_attention("head", True, True), LINEAR, {"scale": 0.5}, ("bonus",)),
    Case("linear_attention-channel-bonus", _linear_attention("channel", bonus=True), LINEAR, {}, ("bonus",)),
    Case("delta_rule", _delta_rule(), DELTA),
    Case("delta_rule-head", _delta_rule("head"), DELTA, {"scale": 0.5}),
    Case("delta_rule-head-groups", _delta_rule("head", groups=True), DELTA),
    Case("delta_rule-head-negative", _delta_rule("head", largest_beta=2.0), DELTA),
    Case("delta_rule-channel", _delta_rule("channel"), DELTA, {"scale": 0.5}),
    Case("delta_rule-channel-groups", _delta_rule("channel", groups=True), DELTA),
    Case("delta_rule-head-erase", _delta_rule("head", erase=True), DELTA, {"beta": None}),
    Case("delta_rule-channel-erase", _delta_rule("channel", erase=True), DELTA, {"beta": None}),
    Case("selective_scan", _selective_scan(), SCAN, {}, SCAN_WEIGHTS),
    Case("selective_scan-groups-skip", _selective_scan(groups=2, skip=True), SCAN, {}, SCAN_WEIGHTS),
    Case("selective_scan-unscaled", _selective_scan(), SCAN, {"scale_input": False}, SCAN_WEIGHTS),
    Case("selective_scan-negative", _selective_scan(groups=2), SCAN, {"negative_eigenvalues": True}, SCAN_WEIGHTS),
    Case("selective_scan-fixed", _selective_scan(fixed=True), SCAN, {}, FIXED_SCAN_WEIGHTS),
    Case("selective_scan-complex", _selective_scan(complex=True), SCAN, {}, SCAN_WEIGHTS),
    Case("selective_scan-complex-fixed", _selective_scan(complex=True, fixed=True), SCAN, {}, FIXED_SCAN_WEIGHTS),
    Case("selective_scan-gated-rnn", _gated_rnn, SCAN, {"scale_input": False}, ("A",)),
    Case("short_conv", _short_conv(4, bias=False), CONV, {}, CONV_WEIGHTS),
    Case("short_conv-bias-silu", _short_conv(3, bias=True), CONV, {"activation": "silu"}, CONV_WEIGHTS),
    Case("short_conv-one-tap", _short_conv(1, bias=True), CONV, {}, CONV_WEIGHTS),
    Case("long_conv", _long_conv, LONG_CONV, {}, ("kernel",)),
    Case("attention", _attention, ATTENTION),
    Case("attention-groups", _grouped_attention, ATTENTION, {"scale": 0.3}),
    Case("attention-window", _attention, ATTENTION, {"window": 9}),
    Case("attention-groups-window", _grouped_attention, ATTENTION, {"window": 70}),
)
