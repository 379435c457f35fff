"""What is special to the long convolution; tests/ops/test_properties.py holds what all ops must satisfy."""

import pytest
import torch
from torch.library import opcheck

from ssm_trn import ops
from ssm_trn.ops.long_conv import NEAR, _far, _far_backward

CHANNELS = 3
# one block, its edges, blocks with and without a later half, several levels
LENGTHS = [1, 2, NEAR - 1, NEAR, NEAR + 1, 2 * NEAR, 2 * NEAR + 1, 3 * NEAR, 3 * NEAR + 1, 200, 600]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_bool(*shape, probability, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < probability


def error(actual, expected):
    assert actual.shape == expected.shape
    norm = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(actual - expected).item() / (norm or 1.0)


def by_matrix(x, kernel, reset=None):
    """The definition as one matrix [T, T] per channel and row: the sum itself, in float64."""
    length = x.shape[1]
    lags = torch.arange(length)[:, None] - torch.arange(length)
    matrix = kernel.double()[lags.clamp(min=0)].masked_fill((lags < 0)[..., None], 0)  # [T, S, D]
    if reset is None:
        return torch.einsum("tsd,bsd->btd", matrix, x.double())
    document = reset.cumsum(1)
    same = document[:, :, None] == document[:, None]
    return torch.einsum("bts,tsd,bsd->btd", same.double(), matrix, x.double())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_equals_the_sum_over_all_earlier_steps(length, with_reset, backend):
    reset = random_bool(2, length, probability=0.03) if with_reset else None
    outcomes = []
    for function in (lambda x, kernel: ops.long_conv(x, kernel, reset=reset)[0], lambda *t: by_matrix(*t, reset)):
        tensors = [normal(2, length, CHANNELS).requires_grad_(), normal(length, CHANNELS, seed=1).requires_grad_()]
        with ops.use_backend(backend):
            y = function(*tensors)
        outcomes.append([y, *torch.autograd.grad((y * normal(*y.shape, seed=2)).sum(), tensors)])
    for actual, expected in zip(*outcomes, strict=True):
        assert error(actual, expected) < 1e-12


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_narrow_numbers_are_summed_in_float32(dtype, tolerance):
    x, kernel = normal(1, 1200, CHANNELS, dtype=dtype), normal(1200, CHANNELS, seed=1, dtype=torch.float32)
    y, state = ops.long_conv(x, kernel)
    assert y.dtype == dtype and state.dtype == torch.float32
    assert error(y.double(), by_matrix(x, kernel)) < tolerance


def test_a_loud_future_does_not_drown_a_quiet_past():
    """A single transform of all steps would leave rounding errors of the loud ones in the quiet ones."""
    x, kernel = normal(1, 1000, CHANNELS, dtype=torch.float32), normal(1000, CHANNELS, seed=1, dtype=torch.float32)
    x[:, 500:] *= 1e8
    y, _ = ops.long_conv(x, kernel)
    assert error(y[:, :500].double(), by_matrix(x[:, :500], kernel[:500])) < 1e-6


def test_no_document_hears_another_one():
    """Not a single bit of it."""
    x, kernel = normal(2, 300, CHANNELS, dtype=torch.float32), normal(300, CHANNELS, seed=1, dtype=torch.float32)
    reset = torch.zeros(2, 300, dtype=torch.bool)
    reset[:, [50, 211]] = True
    y, _ = ops.long_conv(x, kernel, reset=reset)
    x[:, :50], x[:, 211:] = 1e30, -1e30
    assert torch.equal(ops.long_conv(x, kernel, reset=reset)[0][:, 50:211], y[:, 50:211])


def test_masked_steps_may_hold_anything():
    length = 100
    mask = random_bool(3, length, probability=0.6)
    mask[2] = False  # a row of padding only
    x, kernel, past = normal(3, length, CHANNELS), normal(200, CHANNELS, seed=1), normal(3, 7, CHANNELS, seed=3)
    outcomes = []
    for content in (0.0, torch.nan):
        filled = torch.where(mask[..., None], x, content).requires_grad_()
        new = [filled, kernel.clone().requires_grad_(), past.clone().requires_grad_()]
        y, state = ops.long_conv(*new[:2], state=new[2], mask=mask)
        assert y.isfinite().all()
        outcomes.append([y[mask], state, *torch.autograd.grad(y[mask].sum() + (state**2).sum(), new)])
        assert torch.equal(state[2, -7:], past[2]) and not state[2, :-7].any()
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("stop", [1, 2, 40, 150])
def test_masks_and_resets_together_equal_deletion(stop):
    mask, reset = (random_bool(4, stop, probability=p, seed=s) for p, s in ((0.6, 1), (0.1, 2)))
    x, kernel, past = normal(4, stop, CHANNELS), normal(200, CHANNELS, seed=1), normal(4, 5, CHANNELS, seed=3)
    y, state = ops.long_conv(x, kernel, mask=mask, reset=reset, state=past)
    for row in range(4):
        kept, expected_state = mask[row], past[[row]]
        if kept.any():
            inputs = x[[row]][:, kept], kernel
            expected, expected_state = ops.long_conv(*inputs, reset=reset[[row]][:, kept], state=past[[row]])
            assert error(y[[row]][:, kept], expected) < 1e-12
        held = expected_state.shape[1]
        assert torch.equal(state[[row], -held:], expected_state) and not state[row, :-held].any()


def test_operators_keep_the_contract_of_custom_operators():
    history, kernel = normal(2, 70, CHANNELS), normal(70, CHANNELS, seed=1)
    document = random_bool(2, 70, probability=0.05).cumsum(1)
    for documents in (None, document):
        opcheck(_far, (history.clone().requires_grad_(), kernel.clone().requires_grad_(), documents))
        opcheck(_far_backward, (normal(2, 70, CHANNELS, seed=3), history, kernel, documents))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 0, 6)}, r"x must be \[batch, time >= 1, channels\], got \[2, 0, 6\]"),
        ({"kernel": torch.zeros(4, 6)}, r"kernel must be \[at least 5 lags, 6 channels\], got \[4, 6\]"),
        ({"kernel": torch.zeros(5, 1)}, "kernel must be"),
        ({"state": torch.zeros(2, 4, 6)}, r"kernel must be \[at least 9 lags, 6 channels\], got \[5, 6\]"),
        ({"state": torch.zeros(1, 4, 6)}, r"state must be \[2, inputs so far, 6\], got \[1, 4, 6\]"),
        ({"mask": torch.zeros(2, 5)}, r"mask must be bool \[2, 5\], got torch.float32 \[2, 5\]"),
        ({"reset": torch.zeros(2, 4, dtype=torch.bool)}, r"reset must be bool \[2, 5\], got torch.bool \[2, 4\]"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        ops.long_conv(**{"x": torch.zeros(2, 5, 6), "kernel": torch.zeros(5, 6)} | change)
