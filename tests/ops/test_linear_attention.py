"""Linear attention: what the property suite does not know, its limits, memory and answers to wrong input."""

import importlib

import pytest
import torch

from ssm_trn import ops
from tests.ops.cases import CASES, LINEAR
from tests.ops.test_properties import each, error, leaf, loss, run_with_gradients, wide

module = importlib.import_module("ssm_trn.ops.linear_attention")  # ops.linear_attention is the function
LINEAR_CASES = [case for case in CASES if case.op is LINEAR]


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
def test_chunk_size_is_only_a_hint(case):
    inputs, state = case.inputs(70), case.state()
    expected = sum(run_with_gradients(case, inputs, state), [])
    for chunk_size in (1, 2, 5, 16, 128):
        results = sum(run_with_gradients(case, inputs, state, chunk_size=chunk_size), [])
        for actual, part in zip(results, expected, strict=True):
            assert error(actual, part) < 1e-12


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_constant_weak_decay_stays_exact_over_thousands_of_steps(per_channel):
    """Multiplying by a rounded exp(g) at each step would drift by its rounding error times the number of steps."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4000, 2, 4, generator=generator)
    log_decay = torch.full((1, 4000, 2, 4) if per_channel else (1, 4000, 2), -1e-4)
    out, state = ops.linear_attention(q, k, v, log_decay)
    with ops.use_backend("reference"):
        expected, expected_state = ops.linear_attention(*(wide(x) for x in (q, k, v, log_decay)))
    assert error(out, expected) < 1e-6
    assert error(state, expected_state) < 1e-6


def test_training_keeps_the_inputs_and_one_state_per_chunk():
    """Nothing of size [T, C] or [T, K, V]: such a tensor would be the largest of a training step."""
    case = next(case for case in LINEAR_CASES if case.name == "linear_attention-head")
    inputs = each(leaf, case.inputs(512, torch.float32))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out, _ = case(inputs, chunk_size=64)
    states = 512 // 64 * inputs["k"].shape[-1] * out[:, 0].numel()
    assert sum(kept) <= sum(x.numel() for x in inputs.values()) + states
    assert torch.autograd.grad(loss(out), list(inputs.values()))


def test_inference_keeps_no_states():
    q, k, v = torch.randn(3, 1, 300, 2, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        entering = module._attend(q, k, v, torch.zeros(1, 300, 2), torch.zeros(1, 2, 4, 4), 64, 1.0, False)[2]
    assert entering.numel() == 0


def test_a_single_step_needs_no_chunk(monkeypatch):
    states = [case.state() for case in LINEAR_CASES]
    monkeypatch.setattr(module, "chunked", lambda *_: pytest.fail("a decode step went to the chunked form"))
    for case, state in zip(LINEAR_CASES, states, strict=True):
        case(case.inputs(1), state)


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
def test_the_state_is_float32_under_bfloat16_and_autocast(case):
    inputs = case.inputs(70, torch.bfloat16)
    _, (state,) = case(inputs)
    assert state.dtype == torch.float32
    for length in (1, 70):
        inputs = case.inputs(length, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out, (state,) = case(inputs)
        expected, (expected_state,) = case(inputs)
        assert torch.equal(out, expected)
        assert torch.equal(state, expected_state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (2, 7, 4, 5)}, r"q and k must be \[batch, time, key heads, K\]"),
        (
            {"v": (2, 6, 4, 3)},
            r"and v \[batch, time, heads, V\], got \[2, 7, 4, 6\], \[2, 7, 4, 6\] and \[2, 6, 4, 3\]",
        ),
        ({"v": (2, 7, 3)}, r"and v \[batch, time, heads, V\]"),
        ({"v": (2, 7, 6, 3)}, "6 value heads cannot be shared evenly by 4 key heads"),
        ({"q": (2, 0, 4, 6), "k": (2, 0, 4, 6), "v": (2, 0, 4, 3)}, "needs at least one time step"),
        ({"log_decay": (2, 7, 3)}, r"log_decay must be \[2, 7, 4\] or \[2, 7, 4, 6\], got \[2, 7, 3\]"),
        ({"bonus": (6,)}, r"bonus must be \[4, 6\], got \[6\]"),
        ({"state": (2, 4, 3, 6)}, r"state must be \[2, 4, 6, 3\], got \[2, 4, 3, 6\]"),
        ({"reset": (2, 6)}, r"reset must be \[2, 7\], got \[2, 6\]"),
        ({"reset": (2, 7)}, "reset must be a bool tensor, got torch.float32"),
    ],
)
def test_wrong_shapes_are_answered_in_a_sentence(changes, message):
    shapes = {"q": (2, 7, 4, 6), "k": (2, 7, 4, 6), "v": (2, 7, 4, 3)} | changes
    with pytest.raises(ValueError, match=message):
        ops.linear_attention(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def test_a_chunk_has_at_least_one_step():
    q = torch.zeros(1, 3, 1, 2)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        ops.linear_attention(q, q, q, chunk_size=0)
