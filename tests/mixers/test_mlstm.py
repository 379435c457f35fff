"""What is special to mLSTM: its running maximum, and gates that neither overflow nor lose digits."""

import pytest
import torch
import torch.nn.functional as F

from ssm_trn import mixers
from ssm_trn.mixers.mlstm import EPS, read_memory, running_max

from .witnesses import import_transformers

HEADS, KEYS, VALUES = 3, 4, 5


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(length, spread=1.0, batch=2, forget=3.0):
    """q, k, v and the logarithms of both gates; `spread` widens the gates."""
    q, k = normal(2, batch, length, HEADS, KEYS)
    v, gates = normal(batch, length, HEADS, VALUES, seed=1), spread * normal(2, batch, length, HEADS, seed=2)
    return q, k, v, gates[0], F.logsigmoid(forget + gates[1])


def random_reset(length, batch=2):
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(3)) < 0.1


def error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def loop(q, k, v, write, log_forget, reset=None):
    """The definition, step by step (Beck et al. 2024, equations 19 to 27, with their stabiliser), and each m_t."""
    memory, largest = torch.zeros(len(q), HEADS, KEYS, VALUES + 1, dtype=q.dtype), torch.zeros_like(write[:, 0])
    v, out, maxima = F.pad(v, (0, 1), value=1.0), [], []
    for t in range(q.shape[1]):
        if reset is not None:
            memory = memory.masked_fill(reset[:, t, None, None, None], 0)
            largest = largest.masked_fill(reset[:, [t]], 0)
        m = torch.maximum(log_forget[:, t] + largest, write[:, t])
        decay, gate = (log_forget[:, t] + largest - m).exp(), (write[:, t] - m).exp()
        written = torch.einsum("bh,bhk,bhv->bhkv", gate, k[:, t] / KEYS**0.5, v[:, t])
        memory, largest = decay[..., None, None] * memory + written, m
        read = torch.einsum("bhk,bhkv->bhv", q[:, t], memory)
        out.append(read[..., :-1] / (torch.maximum(read[..., -1:].abs(), (-m).exp()[..., None]) + EPS))
        maxima.append(m)
    return torch.stack(out, 1), torch.stack(maxima, 1)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 200])
@pytest.mark.parametrize("with_reset", [False, True])
def test_the_running_maximum_is_that_of_the_loop(length, with_reset):
    *_, write, log_forget = everything = inputs(length, spread=10.0)
    reset = random_reset(length) if with_reset else None
    _, expected = loop(*everything, reset)
    assert torch.allclose(running_max(write, log_forget, reset, torch.zeros(2, HEADS)), expected, atol=1e-12)


def test_the_running_maximum_goes_on_from_any_step_and_passes_over_masked_ones():
    *_, write, log_forget = inputs(50, spread=5.0)
    initial = normal(2, HEADS, seed=4)
    whole = running_max(write, log_forget, None, initial)
    first = running_max(write[:, :17], log_forget[:, :17], None, initial)
    second = running_max(write[:, 17:], log_forget[:, 17:], None, first[:, -1])
    assert torch.allclose(torch.cat([first, second], 1), whole)
    write[:, 20:30], log_forget[:, 20:30] = -torch.inf, 0
    passed = running_max(write, log_forget, None, initial)
    assert torch.allclose(passed[:, 20:30], passed[:, 19:20].expand(-1, 10, -1))


@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("with_reset", [False, True])
def test_gates_of_any_size_give_what_the_loop_gives(spread, with_reset):
    everything = inputs(130, spread)
    reset = random_reset(130) if with_reset else None
    expected, _ = loop(*everything, reset)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        tensors = [x.to(dtype).requires_grad_() for x in everything]
        h, _ = read_memory(*tensors, reset)
        assert error(h, expected) < tolerance
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(h.square().sum(), tensors))


def test_the_maximum_adds_no_error_over_thousands_of_steps():
    """It falls from step to step by what is forgotten, and with it everything is measured anew."""
    q, k, v, write, log_forget = inputs(6000, batch=1, forget=9.0)
    write[:, 1:] -= 14  # the first write outweighs all others for long
    expected, _ = loop(q, k, v, write, log_forget)
    h, _ = read_memory(*(x.float() for x in (q, k, v, write, log_forget)))
    assert error(h[:, -500:], expected[:, -500:]) < 1e-6  # the loop itself, in float32: 2e-6


def test_gradients_equal_those_of_transformers():
    theirs = import_transformers().models.xlstm.modeling_xlstm
    q, k, v, write, _ = everything = [x.requires_grad_() for x in inputs(128)]
    forget = (3 + normal(2, 128, HEADS, seed=5)).requires_grad_()
    tensors = [*everything[:4], forget]
    weight = normal(2, 128, HEADS, VALUES, seed=6)
    h, _ = read_memory(q, k, v, write, F.logsigmoid(forget))
    expected = theirs.mlstm_chunkwise_native_autograd(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)
    assert error(h, expected) < 1e-6
    gradients, others = (torch.autograd.grad((y * weight).sum(), tensors) for y in (h, expected))
    for gradient, other in zip(gradients, others, strict=True):
        assert error(gradient, other) < 1e-5


def test_the_initial_gates_are_those_of_xlstm_7b():
    mixer = mixers.get("mlstm")(64, n_heads=4)
    mixer.reset_parameters()
    assert mixer.gate_bias.tolist() == [-10.0] * 4 + [3.0, 4.0, 5.0, 6.0]
    assert not mixer.gate_proj.weight.any()
