"""The kernels of linear attention against the recurrence, step by step in float64."""

import numpy as np
import pytest
import torch

from ssm_nki import cases, cost, limits
from ssm_nki.linear_attention import linear_attention_backward, linear_attention_forward
from ssm_nki.simulator import Machine
from ssm_nki.simulator.operators import Operator
from tests.kernels.checks import BFLOAT16, FLOAT32, assert_near, case_id, error, every, similar_keys
from tests.kernels.pairwise import pairwise

NAMES = ("q", "k", "v", "log_decay", "state")
CHANNELS, SCALE = 16, 0.3

AXES = {
    "generation": ["gen2", "gen3"],
    "steps": [1, 64, 127, 128, 129, 300, 512],
    "decay": ["none", "head", "head, to -60", "channel", "channel, to -60"],
    "cosine": [0.0, 0.9, 1.0],
    "heads": ["own keys", "shared keys", "shared keys, wide values"],
    "dtype": [FLOAT32, BFLOAT16],
}
SIZES = {"own keys": (2, 2, 24), "shared keys": (4, 2, 64), "shared keys, wide values": (3, 1, 160)}  # H, G, V


def make(steps, decay="head", cosine=0.0, heads="own keys", dtype=FLOAT32, batch=1, channels=CHANNELS):
    """Inputs of the kernels, rounded to their types, by name; heads: a key of SIZES, or numbers like those there."""
    random = np.random.default_rng(0)
    count, groups, values = SIZES[heads] if isinstance(heads, str) else heads
    q = random.standard_normal((batch, steps, groups, channels))
    k = similar_keys(random, (batch, steps, groups, channels), cosine)
    v = random.standard_normal((batch, steps, count, values))
    log_decay = None
    if decay != "none":
        gates = (batch, steps, count) if "head" in decay else (batch, steps, count, channels)
        least = -60.0 if "-60" in decay else -1.0
        log_decay = (least * random.random(gates) ** 4).astype(FLOAT32)  # mostly weak ones, between strong ones
    state = random.standard_normal((batch, count, channels, values)).astype(FLOAT32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return dict(zip(NAMES, (q, k, v, log_decay, state), strict=True))


def recurrence(q, k, v, log_decay, state):
    """o and the final state in float64, from tensors."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).unbind(1) for x in (q, k))
    outputs = []
    for t, v_t in enumerate(v.unbind(1)):
        if log_decay is not None:
            decay = log_decay[:, t].exp()
            state = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        state = state + k[t][..., None] * v_t[..., None, :]
        outputs.append((q[t][..., None, :] @ state).squeeze(-2))
    return SCALE * torch.stack(outputs, 1), state


def expected(inputs, grad_out, grad_final):
    """o, the final state, and the gradients of the inputs, float64 by name."""
    tensors = [None if x is None else torch.tensor(x.astype(np.float64), requires_grad=True) for x in inputs.values()]
    results = recurrence(*tensors)
    torch.autograd.backward(results, [torch.tensor(x.astype(np.float64)) for x in (grad_out, grad_final)])
    named = {"out": results[0].detach().numpy(), "final": results[1].detach().numpy()}
    return named | {f"grad_{name}": x.grad.numpy() for name, x in zip(NAMES, tensors, strict=True) if x is not None}


def simulated(inputs, grad_out, grad_final, generation="gen2"):
    """The same by the kernels."""
    q, k, v, log_decay, state = inputs.values()
    machine = Machine(generation)
    out, final, entering = machine.run(linear_attention_forward, q, k, v, log_decay, state, scale=SCALE, keep=True)
    grads = machine.run(linear_attention_backward, grad_out, grad_final, q, k, v, entering, log_decay, scale=SCALE)
    names = [f"grad_{name}" for name in NAMES if inputs[name] is not None]
    results = {"out": out, "final": final} | dict(zip(names, grads, strict=True))
    for name in ("grad_q", "grad_k"):  # pieces are added here
        pieces = results[name].astype(np.float64)
        results[name] = pieces.reshape(*q.shape[:3], -1, q.shape[3]).sum(3)
    return results


def check(inputs, generation="gen2"):
    """Every result is near enough to the recurrence's, and of its type."""
    random = np.random.default_rng(1)
    dtype = inputs["v"].dtype
    grad_out = random.standard_normal(inputs["v"].shape).astype(dtype)
    grad_final = random.standard_normal(inputs["state"].shape).astype(FLOAT32)
    found, wanted = simulated(inputs, grad_out, grad_final, generation), expected(inputs, grad_out, grad_final)
    assert (found["out"].dtype, found["grad_v"].dtype) == (dtype, dtype)
    assert (found["final"].dtype, found["grad_state"].dtype) == (FLOAT32, FLOAT32)
    assert_near(found, wanted, dtype)


@pytest.mark.parametrize("case", pairwise(**AXES), ids=case_id)
def test_pairs(case):
    case = dict(case)
    generation = case.pop("generation")
    check(make(**case), generation)


@pytest.mark.kernels
@pytest.mark.parametrize("case", every(**AXES), ids=case_id)
def test_cross_product(case):
    test_pairs(case)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize(
    "heads",
    [(12, 1, 64), (3, 1, 64), (6, 3, 8), (5, 5, 128), (2, 1, 512)],
    ids=["two parts", "an odd number", "three key heads", "two blocks", "the widest values"],
)
def test_heads_are_cut_into_parts(heads, decay):
    check(make(130, decay, heads=heads))


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_a_batch(decay):
    check(make(130, decay, heads="shared keys", batch=2))


def test_a_group_of_heads_is_cut_into_blocks():
    check(make(20, "head", heads=(18, 2, 512), channels=8))


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_full_tiles(decay, dtype):
    check(make(256, decay, heads=(2, 1, 128), dtype=dtype, channels=128), "gen4")


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decays_alone(decay):
    """Gradients of e^-60 are as exact as others."""
    inputs = make(150, decay)
    inputs["log_decay"][:] = -60
    inputs["state"] *= 0  # else its gradient, from the first step, is the greatest
    check(inputs)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_decay_of_minus_104_forgets(decay):
    inputs = make(200, decay)
    inputs["log_decay"][:, 150] = -104
    out, final = Machine().run(linear_attention_forward, *inputs.values())
    later = {name: x if name == "state" else x[:, 150:] for name, x in inputs.items()}
    later["state"] = 0 * later["state"]
    alone, last = Machine().run(linear_attention_forward, *later.values())
    assert error(out[:, 150:], alone.astype(np.float64)) < 1e-6
    assert error(final, last.astype(np.float64)) < 1e-6


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_no_state_is_zeros(decay):
    inputs = make(70, decay)
    inputs["state"] = np.zeros_like(inputs["state"])
    with_zeros = Machine().run(linear_attention_forward, *inputs.values())
    without = Machine().run(linear_attention_forward, *list(inputs.values())[:-1])
    for one, other in zip(with_zeros, without, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("decay", ["head, to -60", "channel, to -60"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_no_exponent_is_positive(decay, dtype, monkeypatch):
    greatest = []
    activate = Operator.activate

    def recorded(self, x):
        if self.name == "exp":
            greatest.append(float(x.max()))
        return activate(self, x)

    monkeypatch.setattr(Operator, "activate", recorded)
    inputs = make(140, decay, dtype=dtype)
    grad_out, grad_final = 0 * inputs["v"], 0 * inputs["state"]
    simulated(inputs, grad_out, grad_final)
    assert greatest
    assert max(greatest) <= 0


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("heads", [(8, 1, 512), (70, 1, 64), (4, 4, 512)], ids=["wide", "many", "own keys"])
def test_the_largest_sizes_fit(heads, decay):
    """Into trn1's memories, which are the smallest."""
    machine = Machine("gen2", compute=False)
    if decay == "channel":  # then a part is all that shares anything
        heads = (4, 1, heads[2])
    inputs = make(129, decay, heads=heads, channels=128)
    _, final, entering = machine.run(linear_attention_forward, *inputs.values(), keep=True)
    q, k, v, log_decay, _ = inputs.values()
    machine.run(linear_attention_backward, v, final, q, k, v, entering, log_decay)


def test_limits():
    shapes = {"q": (1, 9, 2, 128), "k": (1, 9, 2, 128), "v": (1, 9, 2, 512)}
    assert limits.supports("linear_attention", shapes, {"q": "bfloat16"})
    assert "128 key channels" in limits.supports("linear_attention", shapes | {"k": (1, 9, 2, 129)}, {}).limit
    assert "512 value channels" in limits.supports("linear_attention", shapes | {"v": (1, 9, 2, 513)}, {}).limit


def test_modelled_times_of_mamba2():
    """On trn1, in milliseconds."""
    first, _, backward = [case for case in cases.all_cases() if case.kernel == "linear_attention"][:3]
    assert (first.direction, backward.direction) == ("fwd", "bwd")
    assert cost.measure(first, "gen2")["ms"] < 0.23
    assert cost.measure(backward, "gen2")["ms"] < 0.62
