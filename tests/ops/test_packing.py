"""Offsets of packed documents become resets, or a sentence that says what is wrong with them."""

import pytest
import torch

from ssm_trn import ops
from ssm_trn.ops.packing import at_last_reset


def test_a_document_begins_at_each_offset():
    expected = torch.tensor([[True, False, True, True, False, False]])
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(ops.resets_from(torch.tensor([0, 2, 3, 6], dtype=dtype), 6), expected)


def test_an_empty_document_leaves_no_trace():
    assert torch.equal(ops.resets_from(torch.tensor([0, 0, 2, 2, 4, 4])), ops.resets_from(torch.tensor([0, 2, 4])))


@pytest.mark.parametrize(
    ("offsets", "length", "message"),
    [
        ([1, 4], None, "must start with 0, got 1"),
        ([0, 3, 2], None, "must not decrease"),
        ([0, 3, 5], 6, "must be the length of the row, 6, got 5"),
        ([0, 0], None, "must be at least 1, got 0"),
        ([0], None, "integers \\[documents \\+ 1\\]"),
        ([[0, 1]], None, "integers \\[documents \\+ 1\\]"),
        ([0.0, 3.0], None, "integers \\[documents \\+ 1\\], got torch.float32"),
    ],
)
def test_bad_offsets(offsets, length, message):
    with pytest.raises(ValueError, match=message):
        ops.resets_from(torch.tensor(offsets), length)


def test_a_packed_row_is_alone_in_its_batch():
    """The resets of one row do not fit a batch of two."""
    q = torch.zeros(2, 4, 1, 3)
    with pytest.raises(ValueError, match=r"reset must be \[2, 4\], got \[1, 4\]"):
        ops.linear_attention(q, q, q, reset=ops.resets_from(torch.tensor([0, 1, 4])))


@pytest.mark.parametrize("length", [1, 2, 7, 64, 65])
def test_what_stood_at_the_last_reset(length):
    generator = torch.Generator().manual_seed(length)
    reset = torch.rand(3, length, generator=generator) < 0.2
    x = torch.randint(5, (3, length), generator=generator).cumsum(1)
    expected = torch.where(reset, x, -7).cummax(1).values
    assert torch.equal(at_last_reset(reset, x, -7), expected)
