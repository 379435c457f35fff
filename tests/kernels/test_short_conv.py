"""The short convolution's kernels against its definition in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ssm_nki import cycles
from ssm_nki.limits import supports
from ssm_nki.short_conv import short_conv_backward, short_conv_forward
from ssm_nki.simulator import Machine
from tests.kernels.checks import BFLOAT16, FLOAT32, assert_near, case_id, every
from tests.kernels.pairwise import pairwise

AXES = {
    "generation": ["gen2", "gen3"],
    "steps": [1, 2, 64, 127, 128, 129, 300, 512],
    "taps": [1, 2, 4, 9],
    "without": ["", "bias", "state", "reads", "bias state reads"],
    "silu": [False, True],
    "dtype": [FLOAT32, BFLOAT16],
}


def reads_of(reset, taps):
    """Which taps read, [B, W, T], for bool [B, T]: none from a reset or after it to before it."""
    since = np.full(len(reset), taps)
    reads = np.ones((len(reset), taps, reset.shape[1]))
    for t in range(reset.shape[1]):
        since = np.where(reset[:, t], 0, since + 1)
        for w in range(taps):
            reads[:, w, t] = taps - 1 - w <= since
    return reads


def make(steps, taps=4, without="", dtype=FLOAT32, batch=1, channels=5):
    """Inputs of the kernels by name, rounded to their types; those named in `without` are None."""
    random = np.random.default_rng(0)
    inputs = {
        "x": random.standard_normal((batch, steps, channels)).astype(dtype),
        "weight": random.standard_normal((channels, taps)).astype(FLOAT32),
        "state": random.standard_normal((batch, taps - 1, channels)).astype(dtype) if taps > 1 else None,
        "bias": random.standard_normal(channels).astype(FLOAT32),
        "reads": reads_of(random.random((batch, steps)) < 0.1, taps).astype(dtype),
    }
    return {name: None if name in without.split() else value for name, value in inputs.items()}


def convolution(x, weight, state, bias, reads, silu):
    """y and the next state, of tensors in float64."""
    steps, taps = x.shape[1], weight.shape[1]
    history = torch.cat([state, x], 1)
    terms = [history[:, w : w + steps] * weight[:, w] for w in range(taps)]
    last = history[:, steps:]
    if reads is not None:
        terms = [term * reads[:, w, :, None] for w, term in enumerate(terms)]
        last = last * reads[:, 1:, -1, None]
    z = sum(terms) if bias is None else sum(terms) + bias
    return F.silu(z) if silu else z, last


def expected(inputs, grad_y, grad_next, silu):
    """y, the next state, and the gradients of the inputs, float64 by name; no states for W = 1."""
    tensors = {name: None if x is None else torch.tensor(x.astype(np.float64)) for name, x in inputs.items()}
    if tensors["state"] is None:
        tensors["state"] = torch.zeros(grad_next.shape, dtype=torch.float64)
    has_state = grad_next.shape[1] > 0
    names = [name for name in ("x", "weight", "state", "bias") if name != "state" or has_state]
    wanted = {name: tensors[name].requires_grad_() for name in names if tensors[name] is not None}
    y, last = convolution(**tensors, silu=silu)
    total = sum((a * torch.tensor(b.astype(np.float64))).sum() for a, b in ((y, grad_y), (last, grad_next)))
    grads = torch.autograd.grad(total, list(wanted.values()))
    results = {"y": y, "last": last} if has_state else {"y": y}
    results |= {f"grad_{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {name: x.detach().numpy() for name, x in results.items()}


def simulated(inputs, grad_y, grad_next, silu, generation="gen2"):
    """The same by the kernels."""
    has_state = grad_next.shape[1] > 0
    machine = Machine(generation)
    results = machine.run(short_conv_forward, **inputs, silu=silu)
    results = dict(zip(("y", "last"), results, strict=True)) if has_state else {"y": results}
    grads = machine.run(short_conv_backward, grad_y, grad_next if has_state else None, **inputs, silu=silu)
    names = ["x", "weight", *(["state"] if has_state else []), *(["bias"] if inputs["bias"] is not None else [])]
    return results | {f"grad_{name}": grad for name, grad in zip(names, grads, strict=True)}


def check(inputs, generation="gen2", silu=True):
    """Every result is near enough to the definition's."""
    random = np.random.default_rng(1)
    x = inputs["x"]
    grad_y = random.standard_normal(x.shape).astype(x.dtype)
    grad_next = random.standard_normal((len(x), inputs["weight"].shape[1] - 1, x.shape[2])).astype(x.dtype)
    found = simulated(inputs, grad_y, grad_next, silu, generation)
    assert_near(found, expected(inputs, grad_y, grad_next, silu), x.dtype)


def _check_case(generation, silu, **sizes):
    check(make(**sizes), generation, silu)


@pytest.mark.parametrize("case", pairwise(**AXES), ids=case_id)
def test_pairs(case):
    _check_case(**case)


@pytest.mark.kernels
@pytest.mark.parametrize("case", every(**AXES), ids=case_id)
def test_cross_product(case):
    _check_case(**case)


@pytest.mark.parametrize("channels", [130, 650])
def test_more_than_one_tile_of_everything(channels):
    check(make(650, batch=2, channels=channels))


def test_the_most_taps_fit_with_resets():
    check(make(300, taps=32, channels=512))


def test_a_split_of_time_changes_nothing():
    whole = make(150, without="reads")
    y, last = Machine().run(short_conv_forward, **whole, silu=True)
    parts, state = [], whole["state"]
    for piece in (slice(0, 1), slice(1, 140), slice(140, 150)):
        inputs = whole | {"x": whole["x"][:, piece], "state": state}
        part, state = Machine().run(short_conv_forward, **inputs, silu=True)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, 1), y, rtol=1e-5, atol=1e-5)
    assert (state == last).all()


def test_limits_are_told():
    assert supports("short_conv", {"weight": (64, 32)}, {"x": "float32"})
    assert supports("short_conv", {"weight": (64, 33)}, {"x": "float32"}).limit.endswith("at most 32 taps, not 33")


def test_modelled_time_on_trn1():
    machine = Machine("gen2", compute=False)
    machine.run(short_conv_forward, **make(2048, dtype=BFLOAT16, channels=2048, without="reads"), silu=True)
    assert cycles.cost(machine.trace).microseconds < 80
