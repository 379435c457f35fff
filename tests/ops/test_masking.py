"""Masked steps are made neutral, whatever they hold."""

import pytest
import torch

from ssm_trn import ops

MASK = torch.tensor([[True, False, True], [False, False, True]])


def test_masked_steps_become_zero_and_their_content_reaches_no_gradient():
    dt = torch.full((2, 3, 4), 2.0)
    dt[~MASK] = torch.nan
    dt.requires_grad_()
    reset = torch.ones(2, 3, dtype=torch.bool)
    new_dt, new_reset, nothing = ops.pass_through(MASK, dt, reset, None)
    assert torch.equal(new_dt, 2.0 * MASK[..., None].expand(2, 3, 4))
    assert torch.equal(new_reset, MASK)
    assert nothing is None
    (gradient,) = torch.autograd.grad((new_dt**2).sum(), dt)
    assert torch.equal(gradient, 2 * new_dt)


def test_without_a_mask_the_tensors_are_the_same():
    x = torch.ones(2, 3)
    assert ops.pass_through(None, x) == (x,)


def test_wrong_input_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"mask must be a bool tensor \[batch, time\], got torch.float32"):
        ops.pass_through(MASK.float(), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"mask \[2, 3\] must match the first two sizes of \[3, 2, 4\]"):
        ops.pass_through(MASK, torch.ones(2, 3), torch.ones(3, 2, 4))
