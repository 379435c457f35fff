"""What is special to the short convolution; tests/ops/test_properties.py holds what all ops must satisfy."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from ssm_trn import ops
from ssm_trn.ops.short_conv import _blocked_backward, blocked

EXACT = 1e-12
CHANNELS = 5


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_bool(*shape: int, probability: float, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < probability


def by_conv1d(x, weight, bias, state, activation=None):
    """The concatenation of state and input through PyTorch's convolution; the tail is its end."""
    history = torch.cat([state, x], 1)
    z = F.conv1d(history.mT, weight[:, None], bias, groups=weight.shape[0]).mT
    return F.silu(z) if activation == "silu" else z, history[:, x.shape[1] :]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    norm = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(actual - expected).item() / (norm or 1.0)


def assert_same_with_gradients(one, two, *tensors: torch.Tensor):
    outcomes = []
    for function in (one, two):
        new = [x.detach().clone().requires_grad_() for x in tensors]
        results = function(*new)
        total = sum((normal(*y.shape, seed=9) * y).sum() for y in results)
        outcomes.append([*results, *torch.autograd.grad(total, new, materialize_grads=True)])
    for actual, expected in zip(*outcomes, strict=True):
        assert error(actual, expected) < EXACT


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_equals_conv1d_also_where_the_input_is_shorter_than_the_filter(taps, length, activation, backend):
    tensors = normal(3, length, CHANNELS), normal(CHANNELS, taps, seed=1), normal(CHANNELS, seed=2)
    state = normal(3, taps - 1, CHANNELS, seed=3)

    def convolve(x, weight, bias, state):
        return ops.short_conv(x, weight, bias, state=state, activation=activation)

    def conv1d(x, weight, bias, state):
        return by_conv1d(x, weight, bias, state, activation)

    with ops.use_backend(backend):
        assert_same_with_gradients(convolve, conv1d, *tensors, state)


@pytest.mark.parametrize("channels", [30000, 2500])  # a block is 2 steps of 1 row, then 26 of 1: neither divides
@pytest.mark.parametrize("with_reset", [False, True])
def test_blocks_that_do_not_divide_time(channels, with_reset):
    length = 30 if channels == 2500 else 7
    reset = random_bool(2, length, probability=0.2) if with_reset else None
    tensors = normal(2, length, channels), normal(channels, 4, seed=1), normal(2, 3, channels, seed=3)

    def default(x, weight, state):
        return ops.short_conv(x, weight, state=state, reset=reset, activation="silu")

    def reference(*tensors):
        with ops.use_backend("reference"):
            return default(*tensors)

    assert_same_with_gradients(default, reference, *tensors)


def test_blocks_that_do_not_divide_the_batch():
    x, weight = normal(300, 3, 80), normal(80, 4, seed=1)  # 273 rows in a block
    y, _ = ops.short_conv(x, weight)
    assert error(y, by_conv1d(x, weight, None, torch.zeros(300, 3, 80).double())[0]) < EXACT


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_masked_steps_may_hold_anything(backend):
    length = 20
    mask = random_bool(3, length, probability=0.6)
    mask[2] = False  # a row of padding only
    x, weight, state = normal(3, length, CHANNELS), normal(CHANNELS, 4, seed=1), normal(3, 3, CHANNELS, seed=3)
    outcomes = []
    for content in (0.0, torch.nan):
        filled = torch.where(mask[..., None], x, content).requires_grad_()
        new = [filled, weight.clone().requires_grad_(), state.clone().requires_grad_()]
        with ops.use_backend(backend):
            y, tail = ops.short_conv(*new[:2], state=new[2], mask=mask, activation="silu")
        assert y.isfinite().all()
        outcomes.append([y[mask], tail, *torch.autograd.grad(y[mask].sum() + (tail**2).sum(), new)])
        assert torch.equal(tail[2], state[2])
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)


def test_masks_and_resets_together_equal_deletion():
    """A masked step is deleted with its reset, in the middle of a filter and in the tail."""
    length = 40
    x, weight, state = normal(4, length, CHANNELS), normal(CHANNELS, 4, seed=1), normal(4, 3, CHANNELS, seed=3)
    mask, reset = random_bool(4, length, probability=0.6, seed=1), random_bool(4, length, probability=0.2, seed=2)
    for stop in (1, 2, 3, length):
        y, tail = ops.short_conv(x[:, :stop], weight, mask=mask[:, :stop], reset=reset[:, :stop], state=state)
        for row in range(4):
            only, kept = slice(row, row + 1), mask[row, :stop]
            if not kept.any():
                assert torch.equal(tail[row], state[row])
                continue
            expected, expected_tail = ops.short_conv(
                x[only, :stop][:, kept], weight, reset=reset[only, :stop][:, kept], state=state[only]
            )
            assert error(y[only, :stop][:, kept], expected) < EXACT
            assert torch.equal(tail[only], expected_tail)


def test_the_tail_is_empty_before_the_last_reset():
    x, weight = normal(1, 6, CHANNELS), normal(CHANNELS, 4)
    reset = torch.zeros(1, 6, dtype=torch.bool)
    reset[0, 4] = True
    _, tail = ops.short_conv(x, weight, reset=reset)
    assert torch.equal(tail, torch.cat([torch.zeros(1, 1, CHANNELS), x[:, 4:]], 1))


def test_the_tail_does_not_keep_the_input_alive():
    _, tail = ops.short_conv(normal(1, 500, CHANNELS), normal(CHANNELS, 4))
    assert tail.untyped_storage().nbytes() == tail.nbytes


@pytest.mark.parametrize("length", [1, 70])
def test_bfloat16_is_summed_in_float32(length):
    x, weight = normal(2, length, CHANNELS).bfloat16(), normal(CHANNELS, 4, seed=1, dtype=torch.float32)
    y, tail = ops.short_conv(x, weight, activation="silu")
    expected, _ = ops.short_conv(x.float(), weight, activation="silu")
    assert y.dtype == tail.dtype == torch.bfloat16
    assert torch.equal(y, expected.bfloat16())


def test_operators_keep_the_contract_of_custom_operators():
    history, weight, bias = normal(2, 12, CHANNELS), normal(4, CHANNELS, seed=1), normal(CHANNELS, seed=2)
    age = torch.arange(9).remainder(4).expand(2, -1)
    opcheck(blocked, (*(x.clone().requires_grad_() for x in (history, weight, bias)), age, True))
    opcheck(_blocked_backward, (normal(2, 9, CHANNELS, seed=3), history, weight, bias, age, True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 0, 6)}, r"x must be \[batch, time >= 1, channels\], got \[2, 0, 6\]"),
        ({"weight": torch.zeros(6, 1, 4)}, r"weight must be \[channels = 6, taps >= 1\], got \[6, 1, 4\]"),
        ({"weight": torch.zeros(4, 6)}, "weight must be"),
        ({"bias": torch.zeros(1)}, r"bias must be \[channels = 6\], got \[1\]"),
        ({"mask": torch.zeros(2, 5)}, r"mask must be bool \[2, 5\], got torch.float32 \[2, 5\]"),
        ({"reset": torch.zeros(2, 4, dtype=torch.bool)}, r"reset must be bool \[2, 5\], got torch.bool \[2, 4\]"),
        ({"state": torch.zeros(2, 4, 6)}, r"state must be \[2, 3, 6\], got \[2, 4, 6\]"),
        ({"activation": "relu"}, "unknown activation 'relu': use None or 'silu'"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        ops.short_conv(**{"x": torch.zeros(2, 5, 6), "weight": torch.zeros(6, 4)} | change)
