"""The property suite once more, with the parallel forms, which are the default on XLA devices; and what is special to
them."""

import pytest
import torch
import torch.nn.functional as F

from ssm_trn import ops
from ssm_trn.ops import parallel
from tests.ops.test_properties import (  # noqa: F401
    error,
    loss,
    test_any_split_equals_one_pass,
    test_equals_the_reference_in_float64,
    test_gradcheck,
    test_gradients_equal_those_of_the_reference_in_float64,
    test_one_strong_decay_erases_what_came_before,
    test_resets_equal_separate_runs,
    test_strong_decay_at_every_step_leaves_the_present_token_alone,
    test_the_past_is_bitwise_the_same_whatever_the_future,
)


@pytest.fixture(autouse=True)
def parallel_forms():
    with ops.use_backend("parallel"):
        yield


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("kind", ["numbers", "complex", "broadcast", "matrices"])
def test_recurrence_equals_a_loop_with_gradients(length, kind):
    shape = {"numbers": (5, 3), "complex": (5, 3), "broadcast": (5, 1), "matrices": (5, 5)}[kind]
    tensors = [normal(2, length, *shape) / 2, normal(2, length, 5, 3, seed=1), normal(2, 5, 3, seed=2)]
    if kind == "complex":
        tensors = [torch.complex(x, x.roll(1, 1)) for x in tensors]
    leaves = [x.requires_grad_() for x in tensors]
    states = parallel.recurrence(*leaves, matrices=kind == "matrices")
    decay, write, state = leaves
    expected = [state]
    for t in range(length):
        before = decay[:, t] @ expected[-1] if kind == "matrices" else decay[:, t] * expected[-1]
        expected.append(before + write[:, t])
    expected = torch.stack(expected, 1)
    assert error(states, expected) < 1e-14
    for one, two in zip(*(torch.autograd.grad(loss(x), leaves) for x in (states, expected)), strict=True):
        assert error(one, two) < 1e-14


@pytest.mark.parametrize("largest_beta", [1.0, 2.0])
# With one key for all steps, what a decay changes is overwritten at once: its gradient is next to 0, all rounding.
@pytest.mark.parametrize(("cosine", "with_decay"), [(0.0, False), (0.9, False), (1.0, False), (0.0, True), (0.9, True)])
def test_delta_rule_with_similar_keys_keeps_its_digits(cosine, largest_beta, with_decay):
    """Over many chunks: neither the inverses nor the products of transitions may blow up what rounds off."""
    length, heads, channels = 1000, 2, 16
    shape = 1, length, heads, channels
    common, own = (F.normalize(x, dim=-1) for x in (normal(1, 1, heads, channels), normal(*shape, seed=1)))
    k = F.normalize(cosine**0.5 * common + (1 - cosine) ** 0.5 * own, dim=-1)
    inputs = {"q": k.roll(1, 1), "k": k, "v": normal(*shape, seed=2)}
    inputs["beta"] = largest_beta * torch.sigmoid(4 + normal(1, length, heads, seed=3))
    if with_decay:
        inputs["log_decay"] = -0.01 * normal(1, length, heads, seed=4).abs()
    narrow = {name: x.float().requires_grad_() for name, x in inputs.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in narrow.items()}
    out, state = ops.delta_rule(**narrow)
    with ops.use_backend("reference"):
        expected, expected_state = ops.delta_rule(**wide)
    assert error(out, expected) < 1e-5 and error(state, expected_state) < 1e-5
    gradients = (
        torch.autograd.grad(loss(*results), list(of.values()))
        for results, of in (((out, state), narrow), ((expected, expected_state), wide))
    )
    for gradient, exact in zip(*gradients, strict=True):
        assert error(gradient, exact) < 1e-5


def test_the_number_of_operators_grows_with_the_logarithm_of_time():
    """Counted as a tracing compiler meets them, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.calls += 1
            return function(*arguments, **(options or {}))

    def count(length: int) -> int:
        q, k, v = (normal(1, length, 1, 4, seed=i).requires_grad_() for i in range(3))
        with Count() as counted:
            out, _ = ops.delta_rule(q, F.normalize(k, dim=-1), v, torch.ones(1, length, 1).double())
            out.sum().backward()
        return counted.calls

    first, second, third = (count(length) for length in (256, 1024, 4096))
    assert second - first == third - second < first / 4
