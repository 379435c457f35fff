"""Settings in which an op must equal a simpler one, or another library's."""

import pytest
import torch
import torch.nn.functional as F

from ssm_trn import ops
from tests.ops.cases import CASES, Case
from tests.ops.test_properties import error

LENGTHS = (7, 50, 64, 65, 200, 1000)


def case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def assert_equal(one, two, tolerance=1e-6):
    """Two results (out, state) of an op."""
    for a, b in zip(one, two, strict=True):
        assert error(a, b) < tolerance


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("op", [ops.linear_attention, ops.delta_rule])
def test_log_decay_0_is_no_decay(op, length):
    inputs = case(op.__name__).inputs(length, torch.float32)
    plain = op(**inputs)
    batch, _, heads, keys = inputs["q"].shape
    for shape in ((heads,), (heads, keys)):
        assert_equal(op(**inputs, log_decay=torch.zeros(batch, length, *shape)), plain)


@pytest.mark.parametrize("length", LENGTHS)
def test_linear_attention_without_decay_is_masked_attention_without_softmax(length):
    inputs = case("linear_attention").inputs(length, torch.float32)
    q, k, v = (x.transpose(1, 2) for x in inputs.values())  # [B, H, T, X]
    out, state = ops.linear_attention(**inputs)
    assert_equal((out.transpose(1, 2), state), ((q @ k.mT).tril() @ v, k.mT @ v))


@pytest.mark.parametrize("name", ["linear_attention-head", "delta_rule-head"])
def test_the_same_decay_in_every_channel_is_a_decay_per_head(name):
    inputs = case(name).inputs(130)
    per_channel = inputs | {"log_decay": inputs["log_decay"][..., None].expand_as(inputs["q"])}
    assert_equal(case(name).op(**per_channel), case(name).op(**inputs), 1e-12)


@pytest.mark.parametrize("name", [case.name for case in CASES if "groups" in case.name and "scan" not in case.name])
def test_a_group_of_heads_that_shares_a_key_is_as_many_equal_keys(name):
    inputs = case(name).inputs(130)
    shared = ("k", "v") if case(name).op is ops.attention else ("q", "k")
    repeated = {n: x.repeat_interleave(2, 2) if n in shared else x for n, x in inputs.items()}
    options = case(name).options
    out, expected = (case(name).op(**x, **options)[0] for x in (repeated, inputs))
    assert error(out, expected) < 1e-12


def test_a_bonus_of_1_without_decay_is_the_plain_rule():
    inputs = case("linear_attention").inputs(130)
    bonus = torch.ones(inputs["v"].shape[2], inputs["k"].shape[3], dtype=torch.float64)
    assert_equal(ops.linear_attention(**inputs, bonus=bonus), ops.linear_attention(**inputs), 1e-12)


@pytest.mark.parametrize("name", ["delta_rule-head", "delta_rule-channel"])
def test_the_delta_rule_erases_along_its_own_key(name):
    inputs = case(name).inputs(130)
    expected = ops.delta_rule(**inputs)
    beta, decay = inputs.pop("beta")[..., None], inputs["log_decay"].exp()
    decayed = inputs["k"] * (decay if decay.dim() == 4 else decay[..., None])
    inputs["k"] = beta * inputs["k"]
    assert_equal(ops.delta_rule(**inputs, beta=None, erase=(inputs["k"], decayed)), expected, 1e-12)


def test_a_selective_scan_with_one_rate_per_head_is_linear_attention():
    """Mamba-2 is Mamba with a scalar A (state-space duality): C, B, dt x and dt A are its q, k, v and log decay."""
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, values, states = 2, 130, 3, 4, 6
    x = torch.randn(batch, length, heads, values, generator=generator, dtype=torch.float64)
    dt = torch.rand(batch, length, heads, generator=generator, dtype=torch.float64)
    rate = -torch.rand(heads, generator=generator, dtype=torch.float64)
    B, C = torch.randn(2, batch, length, 1, states, generator=generator, dtype=torch.float64)
    out, state = ops.linear_attention(C, B, dt[..., None] * x, dt * rate)
    y, h = ops.selective_scan(
        x.flatten(2), dt.repeat_interleave(values, 2), rate.repeat_interleave(values)[:, None].expand(-1, states), B, C
    )
    assert_equal((y.unflatten(2, (heads, values)), h.unflatten(1, (heads, values)).mT), (out, state), 1e-12)


@pytest.mark.parametrize("name", ["selective_scan-fixed", "selective_scan-complex-fixed"])
def test_fixed_coefficients_are_the_same_at_every_step(name):
    inputs = case(name).inputs(70)
    channels = inputs["x"].shape[2]
    moving = {n: inputs[n].expand(2, 70, channels, -1) for n in ("B", "C")}  # one group per channel
    assert_equal(ops.selective_scan(**inputs | moving), ops.selective_scan(**inputs), 1e-12)


def test_a_complex_scan_of_real_numbers_is_twice_the_real_one():
    inputs = case("selective_scan").inputs(70)
    expected, _ = ops.selective_scan(**inputs)
    y, _ = ops.selective_scan(**inputs | {"A": inputs["A"].to(torch.complex128)})
    assert error(y, 2 * expected) < 1e-12


@pytest.mark.parametrize("length", [1, 2, 3, 4, 70])
def test_short_convolution_is_conv1d_padded_on_the_left(length):
    """With an initial state too, and with fewer steps than taps; the final state is the end of what was convolved."""
    inputs = case("short_conv").inputs(length)
    state = torch.randn(2, 3, inputs["x"].shape[2], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tensors = [x.requires_grad_() for x in (inputs["x"], state, inputs["weight"])]
    history = torch.cat([state, inputs["x"]], 1)
    expected = F.conv1d(history.mT, inputs["weight"][:, None], groups=history.shape[2]).mT
    y, final = ops.short_conv(inputs["x"], inputs["weight"], state=state)
    assert_equal((y, final), (expected, history[:, -3:]), 1e-12)
    gradients = (torch.autograd.grad((out * out).sum(), tensors) for out in (y, expected))
    assert_equal(*gradients, 1e-12)


@pytest.mark.parametrize("window", [None, 70, 1000])
def test_attention_is_softmax_attention_as_long_as_the_window_covers_all(window):
    inputs = case("attention").inputs(70)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs.values()), is_causal=True)
    assert error(ops.attention(**inputs, window=window)[0], expected.transpose(1, 2)) < 1e-12
