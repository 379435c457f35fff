"""What must hold for every mixer, whatever it computes."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from ssm_trn import mixers
from ssm_trn.state import map_state

from .cases import CASES, activations, make

every_case = pytest.mark.parametrize("case", CASES)


def in_pieces(mixer, x, bounds, state=None, mask=None, reset=None):
    """The mixer run over x[:, a:b] for each pair of neighbouring bounds, the state handed on."""
    outs = []
    for first, last in pairwise(bounds):
        part = slice(first, last)
        y, state = mixer(
            x[:, part],
            state,
            None if mask is None else mask[:, part],
            None if reset is None else reset[:, part],
        )
        outs.append(y)
    return torch.cat(outs, 1), state


def test_every_mixer_has_a_case():
    assert {case["mixer"] for case in CASES.values()} == set(mixers.names())


@every_case
@pytest.mark.parametrize("bounds", [(0, 65, 130), (0, 1, 64, 67, 130), (0, 63, 129, 130)])
@pytest.mark.parametrize("preallocated", [False, True])
def test_any_split_equals_one_pass(case, bounds, preallocated):
    mixer, x = make(case), activations(2, 130)
    expected, expected_state = mixer(x)
    state = mixer.init_state(2, 130, "cpu", x.dtype) if preallocated else None
    y, state = in_pieces(mixer, x, bounds, state)
    assert_close(y, expected)
    if case.split("-")[0] != "attention":  # a cache may keep the same tokens in other slots
        assert_close(state, expected_state)


@every_case
def test_step_by_step_equals_one_pass_with_steps_of_one_shape(case):
    mixer, x = make(case), activations(2, 20)
    expected, _ = mixer(x)
    state = mixer.init_state(2, 20, "cpu", x.dtype)
    shapes = [part.shape for part in state]
    for t in range(20):
        y, state = mixer(x[:, [t]], state)
        assert_close(y, expected[:, [t]])
        assert [part.shape for part in state] == shapes


@every_case
def test_step_by_step_equals_one_pass_in_bfloat16(case):
    mixer, x = make(case, torch.float32).bfloat16(), activations(2, 20, dtype=torch.bfloat16)
    expected, _ = mixer(x)
    y, _ = in_pieces(mixer, x, range(21), mixer.init_state(2, 20, "cpu", x.dtype))
    assert y.dtype == torch.bfloat16
    assert ((y - expected).norm() / expected.norm()) < 1e-2


@every_case
def test_a_step_leaves_the_state_that_it_starts_from_as_it_was(case):
    if case.split("-")[0] == "attention":
        pytest.skip("a cache is written in place")
    mixer, x = make(case), activations(2, 7)
    with torch.inference_mode():
        _, state = mixer(x[:, :6])
        before = map_state(torch.clone, state)
        first, _ = mixer(x[:, 6:], state)
        assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True))
        assert torch.equal(mixer(x[:, 6:], state)[0], first)


def masks(length):
    generator = torch.Generator().manual_seed(3)
    left = torch.arange(length).expand(2, -1) >= torch.tensor([[4], [0]])
    inside = torch.rand(2, length, generator=generator) < 0.6
    return {
        "left": left,
        "right": left.flip(1),
        "inside": inside,
        "all of a row": left & torch.tensor([[False], [True]]),
    }


@every_case
@pytest.mark.parametrize("kind", masks(4))
@pytest.mark.parametrize("with_reset", [False, True])
def test_a_masked_run_equals_the_run_without_the_masked_steps(case, kind, with_reset):
    length = 14
    mixer, x, mask = make(case), activations(2, length), masks(length)[kind]
    reset = torch.rand(2, length, generator=torch.Generator().manual_seed(4)) < 0.2 if with_reset else None
    y, state = mixer(x, None, mask, reset)
    y_pieces, state = in_pieces(mixer, x, (0, 5, 6, length), None, mask, reset)
    future = activations(2, 3, seed=9)
    after, _ = mixer(future, state)
    assert torch.isfinite(y).all()
    for row in range(2):
        real = mask[row]
        row_reset = None if reset is None else reset[row, real][None]
        if real.any():
            expected, row_state = mixer(x[row, real][None], None, None, row_reset)
            assert_close(y[row, real], expected[0])
            assert_close(y_pieces[row, real], expected[0])
        else:
            row_state = None
        assert_close(after[row], mixer(future[[row]], row_state)[0][0])


@every_case
def test_what_is_masked_changes_nothing(case):
    mixer, x = make(case, torch.float32), activations(1, 8, dtype=torch.float32)
    mask = torch.tensor([[True, True, True, False, False, False, True, True]])
    y, _ = mixer(x, None, mask)
    x[:, 3:6] = 1e4
    assert torch.equal(mixer(x, None, mask)[0][mask], y[mask])


@every_case
def test_resets_equal_separate_runs(case):
    lengths = [1, 63, 64, 65, 7]
    mixer, x = make(case), activations(1, sum(lengths)).requires_grad_()
    reset = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    reset[0, starts] = True
    packed, state = mixer(x, None, None, reset)
    separate = [mixer(part) for part in x.split(lengths, 1)]
    expected = torch.cat([y for y, _ in separate], 1)
    assert_close(packed, expected)
    weight = activations(1, sum(lengths), seed=5)
    (gradient,) = torch.autograd.grad((packed * weight).sum(), x, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), x, retain_graph=True)
    assert_close(gradient, expected_gradient)
    future = activations(1, 5, seed=6)
    assert_close(mixer(future, state)[0], mixer(future, separate[-1][1])[0])


@every_case
def test_the_future_does_not_change_the_past(case):
    mixer, x = make(case, torch.float32), activations(1, 70, dtype=torch.float32)
    y, _ = mixer(x)
    for t in (1, 17, 64, 69):
        changed = x.clone()
        changed[:, t:] = 3.0 * changed[:, t:].flip(1) + 1.0
        assert torch.equal(mixer(changed)[0][:, :t], y[:, :t])


@every_case
def test_gradients_pass_through_the_state(case):
    mixer, x = make(case), activations(2, 21).requires_grad_()
    weight = activations(2, 21, seed=5)
    parameters = [x, *mixer.parameters()]
    whole = torch.autograd.grad((mixer(x)[0] * weight).sum(), parameters)
    split = torch.autograd.grad((in_pieces(mixer, x, (0, 4, 5, 21))[0] * weight).sum(), parameters)
    assert_close(split, whole)


@every_case
def test_rows_of_a_state_can_be_selected(case):
    mixer, x = make(case), activations(3, 9)
    _, state = mixer(x[:, :6])
    rows = torch.tensor([2, 0, 2])
    y, _ = mixer(x[rows, 6:], map_state(lambda part: part[rows], state))
    assert_close(y, mixer(x)[0][rows, 6:])


@every_case
def test_bfloat16_keeps_gates_and_states_in_float32(case):
    mixer, x = make(case, torch.float32), activations(2, 70, dtype=torch.bfloat16)
    expected, _ = mixer(x.float())
    mixer.bfloat16()
    assert {name for name, p in mixer.named_parameters() if p.dtype == torch.float32} == {
        name for name, p in mixer.named_parameters() if not isinstance(owner(mixer, name), torch.nn.Linear)
    }
    y, state = mixer(x)
    assert y.dtype == torch.bfloat16
    assert ((y - expected).norm() / expected.norm()) < 3e-2  # weights and activations are rounded to 3 digits
    if case.split("-")[0] != "attention":
        assert state[-1].dtype == torch.float32


def owner(module, parameter):
    return module.get_submodule(parameter.rpartition(".")[0])


@every_case
def test_state_size_counts_what_is_remembered(case):
    mixer = make(case)
    for length in (1, 7, 300):
        _, state = mixer(activations(1, length))
        full = sum(part.numel() for part in state if part.is_floating_point())
        assert mixer.state_size(length) == full
