"""Parts that several mixers share."""

import pytest
import torch
from torch.testing import assert_close

from ssm_trn import ops
from ssm_trn.layers import GroupNorm, RMSNorm, previous_step

LENGTH = 14
FLAGS = torch.rand(2, 2, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
CASES = {
    "plain": (None, None),
    "masked": (FLAGS[0], None),
    "reset": (None, FLAGS[1]),
    "masked and reset": tuple(FLAGS),
    "all of a row masked": (FLAGS[0] & torch.tensor([[False], [True]]), FLAGS[1]),
}


def shifted_by_a_loop(x, state, mask, reset):
    """What previous_step returns at real steps, and the last real step, for one row x [T, ...]."""
    out, previous = [], state
    for t in range(len(x)):
        if mask is None or mask[t]:
            out.append(torch.zeros_like(x[t]) if reset is not None and reset[t] else previous)
            previous = x[t]
    return out, previous


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("bounds", [(0, LENGTH), (0, 1, 6, LENGTH)])
def test_the_previous_step_is_that_of_a_plain_loop(case, shape, bounds):
    mask, reset = CASES[case]
    x, initial = torch.randn(2, LENGTH, *shape), torch.randn(2, 1, *shape)
    parts, state = [], initial
    for a, b in zip(bounds, bounds[1:], strict=False):
        before, state = previous_step(x[:, a:b], state, *(f if f is None else f[:, a:b] for f in (mask, reset)))
        parts.append(before)
    before = torch.cat(parts, 1)
    for row in range(2):
        row_mask, row_reset = (flags if flags is None else flags[row] for flags in (mask, reset))
        expected, last = shifted_by_a_loop(x[row], initial[row, 0], row_mask, row_reset)
        real = before[row] if mask is None else before[row, mask[row]]
        assert len(real) == len(expected) and all(map(torch.equal, real, expected))
        assert torch.equal(state[row, 0], last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_previous_step_is_a_convolution_with_one_tap(dtype):
    x, (mask, reset) = torch.randn(2, LENGTH, 3).to(dtype), FLAGS
    expected, tail = ops.short_conv(x, torch.tensor([[1.0, 0.0]]).expand(3, 2), mask=mask, reset=reset)
    before, last = previous_step(x, None, mask, reset)
    assert before.dtype == last.dtype == dtype
    assert torch.equal(before[mask], expected[mask]) and torch.equal(last, tail)
    assert previous_step(x, last.float(), None, None)[0].dtype == dtype


def test_what_is_masked_reaches_neither_the_next_steps_nor_their_gradients():
    mask = FLAGS[0]
    x = torch.randn(2, LENGTH, 3).masked_fill(~mask[..., None], torch.nan).requires_grad_()
    before, last = previous_step(x, None, mask, None)
    (gradient,) = torch.autograd.grad(before[mask].sum() + last.sum(), x)
    assert before[mask].isfinite().all() and last.isfinite().all()
    assert torch.equal(gradient, mask[..., None].expand_as(gradient).to(gradient))


def test_group_norm_is_that_of_pytorch():
    ours, theirs = GroupNorm(12, groups=3, eps=1e-3), torch.nn.GroupNorm(3, 12, eps=1e-3)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 12)
    expected = theirs(x.flatten(0, 1)).view_as(x)
    assert_close(ours(x), expected)
    assert ours.bfloat16()(x.bfloat16()).dtype == torch.bfloat16 and ours.weight.dtype == torch.float32
    ours.reset_parameters()
    assert ours.weight.eq(1).all() and ours.bias.eq(0).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_rms_norm_is_its_formula(groups):
    norm, x = RMSNorm(12, eps=1e-3, groups=groups).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    parts = x.unflatten(-1, (groups, -1))
    expected = (parts / (parts.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(-2) * norm.weight
    assert_close(norm(x), expected)
    assert_close(norm.float()(x.float()), expected.float())
    narrow = norm.bfloat16()(x.bfloat16())  # rounded at its ends alone
    assert norm.weight.dtype == torch.float32
    assert torch.equal(narrow, norm(x.bfloat16().float()).bfloat16())
