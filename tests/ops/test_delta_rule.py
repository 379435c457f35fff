"""The delta rule: what the property suite does not know. Witnesses, keys that are alike, memory, wrong input."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from ssm_trn import ops
from tests.ops.cases import CASES, DELTA
from tests.ops.test_properties import each, error, leaf, loss, run_with_gradients, wide

module = importlib.import_module("ssm_trn.ops.delta_rule")  # ops.delta_rule is the function
DELTA_CASES = [case for case in CASES if case.op is DELTA]
every_delta_case = pytest.mark.parametrize("case", DELTA_CASES, ids=lambda case: case.name)


def random(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return F.normalize(random(seed, *shape, dtype=torch.float64), dim=-1).to(dtype)


def expected_of(*inputs, **options):
    """out and state of the plain loop in float64, on the inputs as they were rounded."""
    with ops.use_backend("reference"):
        return ops.delta_rule(*(wide(x) for x in inputs), **options)


@pytest.fixture(scope="module")
def qwen3_next():
    """The torch code of transformers' Qwen3-Next."""
    pytest.importorskip("transformers", reason="the witness is transformers' Qwen3-Next")
    return importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 300])
def test_equals_the_gated_delta_rule_of_transformers(qwen3_next, length, key_heads):
    """Qwen3-Next (transformers), step by step and by chunks: outputs, final state and gradients."""
    q, k = (unit(seed, 2, length, key_heads, 16) for seed in (0, 1))
    v, beta = random(2, 2, length, 4, 8), torch.sigmoid(random(3, 2, length, 4))
    log_decay, state = -F.softplus(random(4, 2, length, 4)), random(5, 2, 4, 16, 8)
    inputs = [leaf(x) for x in (q, k, v, beta, log_decay, state)]
    q, k, v, beta, log_decay, state = inputs
    own = ops.delta_rule(q, k, v, beta, log_decay, state=state, scale=16**-0.5)
    gradients = torch.autograd.grad(loss(*own), inputs)

    repeated = [x.repeat_interleave(4 // key_heads, 2) for x in (q, k)]
    options = {"initial_state": state, "output_final_state": True}
    for function in (qwen3_next.torch_recurrent_gated_delta_rule, qwen3_next.torch_chunk_gated_delta_rule):
        theirs = function(*repeated, v, log_decay, beta, **options)
        for actual, expected in zip(own, theirs, strict=True):
            assert error(actual, expected) < 1e-5
    for actual, expected in zip(gradients, torch.autograd.grad(loss(*theirs), inputs), strict=True):
        assert error(actual, expected) < 1e-5


def test_erase_is_the_state_update_of_rwkv_7():
    """As its paper writes it (arXiv:2503.14456, section 4), in rows and with a state [V, K]:
    S_t = S_{t-1} (diag(w_t) - kappa_t^T (a_t * kappa_t)) + v_t^T k_t and o_t = S_t r_t^T.
    """
    r, k, w, a = (random(seed, 1, 100, 1, 6, dtype=torch.float64) for seed in range(4))
    kappa, v = unit(4, 1, 100, 1, 6, dtype=torch.float64), random(5, 1, 100, 1, 5, dtype=torch.float64)
    w, a = torch.exp(-torch.exp(w)), torch.sigmoid(a)
    S, expected = torch.zeros(5, 6, dtype=torch.float64), []
    for t in range(100):
        r_t, k_t, w_t, a_t, kappa_t, v_t = (x[0, t] for x in (r, k, w, a, kappa, v))
        S = S @ (torch.diag(w_t[0]) - kappa_t.mT @ (a_t * kappa_t)) + v_t.mT @ k_t
        expected.append((S @ r_t.mT).mT)
    out, state = ops.delta_rule(r, k, v, None, w.log(), erase=(a * kappa, kappa))
    assert error(out[0], torch.stack(expected)) < 1e-12
    assert error(state[0, 0], S.mT) < 1e-12


@pytest.mark.parametrize("channels", [1, 6])
def test_several_writes_in_a_token_are_as_many_steps_with_the_decay_on_the_first(channels):
    """DeltaProduct (arXiv:2502.10297, equation 3): A_t = (I - beta_2 k_2 k_2^T) (I - beta_1 k_1 k_1^T) exp(g_t)."""
    k, beta = unit(0, 1, 40, 1, 6, dtype=torch.float64), 2 * torch.rand(1, 40, 1, dtype=torch.float64)
    v, q = (random(seed, 1, 40, 1, n, dtype=torch.float64) for seed, n in ((1, 5), (2, 6)))
    log_decay = -random(3, 1, 40, 1, channels, dtype=torch.float64).abs()
    log_decay[:, 1::2] = 0  # steps 2 t and 2 t + 1 are token t
    S, expected = torch.zeros(6, 5, dtype=torch.float64), []
    for t in range(20):
        S = log_decay[0, 2 * t, 0, :, None].exp() * S
        for step in (2 * t, 2 * t + 1):
            key = k[0, step].mT  # [K, 1]
            S = (torch.eye(6, dtype=torch.float64) - beta[0, step, 0] * key @ key.mT) @ S
            S = S + beta[0, step, 0] * key @ v[0, step]
        expected.append(q[0, 2 * t + 1] @ S)
    out, state = ops.delta_rule(q, k, v, beta, log_decay if channels > 1 else log_decay[..., 0])
    assert error(out[0, 1::2], torch.stack(expected)) < 1e-12
    assert error(state[0, 0], S) < 1e-12


def test_a_write_of_strength_1_replaces_what_the_key_held():
    k, v, state = unit(0, 2, 100, 3, 16), random(1, 2, 100, 3, 5), random(2, 2, 3, 16, 5)
    out, _ = ops.delta_rule(k, k, v, torch.ones(2, 100, 3), state=state)
    assert error(out, v) < 1e-6


def test_strength_2_reflects_the_state():
    """The state transition has the eigenvalue -1: what a key held changes its sign with every write of 0."""
    k, state = unit(0, 1, 1, 1, 8).expand(1, 101, 1, 8), random(1, 1, 1, 8, 5)
    out, final = ops.delta_rule(k, k, torch.zeros(1, 101, 1, 5), torch.full((1, 101, 1), 2.0), state=state)
    signs = torch.tensor([-1.0, 1.0]).repeat(51)[:101, None]
    assert error(out[0, :, 0], signs * (k[0, 0] @ state[0, 0])) < 1e-5
    assert error(k[0, 0] @ final[0, 0], -(k[0, 0] @ state[0, 0])) < 1e-5


@pytest.mark.parametrize("decay_shape", [None, (2,), (2, 32)], ids=["none", "head", "channel"])
@pytest.mark.parametrize("strength", [1.0, 1.9, 2.0])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1, 1.0])
def test_keys_that_are_alike_lose_no_digits(noise, strength, decay_shape):
    """An inverse by repeated squaring is off by 1e3 and more here.

    At strength 2 with one key nothing fades, and the rounding of k^T k, the same at each step, adds up over time.
    """
    common, own = unit(0, 1, 1, 2, 32, dtype=torch.float64), unit(1, 1, 70, 2, 32, dtype=torch.float64)
    k = F.normalize(common + noise * own, dim=-1).float()
    q, v, beta = unit(2, 1, 70, 2, 32), random(3, 1, 70, 2, 32), torch.full((1, 70, 2), strength)
    inputs = [q, k, v, beta]
    if decay_shape:
        inputs.append(-1e-3 * random(4, 1, 70, *decay_shape).abs())
    for actual, expected in zip(ops.delta_rule(*inputs), expected_of(*inputs), strict=True):
        assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_the_inverse_of_a_chunk_of_unit_keys_is_of_order_1(strength):
    """z of y = identity is the inverse that a chunk of 128 steps applies."""
    k, beta = unit(0, 1, 128, 1, 64), torch.full((1, 128, 1, 1), strength)
    identity = torch.eye(128)[None, :, None]  # [B, T, H, V]
    state, no_decay = torch.zeros(1, 1, 64, 128), torch.zeros(1, 128, 1, 1)
    z = module._run(k, k, k, no_decay, identity, beta, state, 128, 1.0, True, True)[2][0, 0]
    keys = wide(k[0, :, 0])
    inverse = torch.linalg.inv(torch.eye(128, dtype=torch.float64) + strength * (keys @ keys.mT).tril(-1))
    assert error(z / strength, inverse) < 1e-6
    assert 0.999 < (z / strength).abs().max() < 1.001


def test_keys_that_are_not_of_length_1_are_computed_as_they_are():
    """The state then grows without bound: that is the rule, and is not hidden."""
    q, k, v = (random(seed, 1, 64, 1, 8, dtype=torch.float64) for seed in range(3))
    out, state = ops.delta_rule(q, k, v, torch.ones(1, 64, 1))
    expected, expected_state = expected_of(q, k, v, torch.ones(1, 64, 1))
    assert expected_state.abs().max() > 1e20
    assert error(out, expected) < 1e-9
    assert error(state, expected_state) < 1e-9


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_constant_weak_decay_stays_exact_over_thousands_of_steps(per_channel):
    """Multiplying by a rounded exp(g) at each step would drift by its rounding error times the number of steps."""
    q, k, v = unit(0, 1, 4000, 2, 8), unit(1, 1, 4000, 2, 8), random(2, 1, 4000, 2, 4)
    log_decay = torch.full((1, 4000, 2, 8) if per_channel else (1, 4000, 2), -1e-4)
    inputs = q, k, v, torch.full((1, 4000, 2), 1e-3), log_decay
    for actual, expected in zip(ops.delta_rule(*inputs), expected_of(*inputs), strict=True):
        assert error(actual, expected) < 2e-6


@every_delta_case
def test_chunk_size_is_only_a_hint(case):
    inputs, state = case.inputs(70), case.state()
    expected = sum(run_with_gradients(case, inputs, state), [])
    for chunk_size in (1, 2, 5, 16, 128):
        results = sum(run_with_gradients(case, inputs, state, chunk_size=chunk_size), [])
        for actual, part in zip(results, expected, strict=True):
            assert error(actual, part) < 1e-12


@every_delta_case
def test_chunks_computed_some_at_a_time_are_those_computed_at_once(case, monkeypatch):
    inputs, state = case.inputs(300), case.state()
    expected = sum(run_with_gradients(case, inputs, state), [])
    monkeypatch.setattr(module, "SPAN", 3 * inputs["v"][:, : module.CHUNK_SIZE].numel())
    for actual, part in zip(sum(run_with_gradients(case, inputs, state), []), expected, strict=True):
        assert error(actual, part) < 1e-12


def test_training_keeps_the_inputs_the_corrections_and_one_state_per_chunk():
    """Nothing of size [T, C] or [T, K, V]: such a tensor would be the largest of a training step."""
    case = next(case for case in DELTA_CASES if case.name == "delta_rule-head")
    inputs = each(leaf, case.inputs(512, torch.float32))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.update({x.data_ptr(): x.numel()}) or x, lambda x: x):
        out, _ = case(inputs, chunk_size=64)
    states = 512 // 64 * inputs["k"].shape[-1] * out[:, 0].numel()
    assert sum(kept.values()) <= sum(x.numel() for x in inputs.values()) + out.numel() + states
    assert torch.autograd.grad(loss(out), list(inputs.values()))


def test_inference_keeps_nothing():
    case = DELTA_CASES[0]
    inputs = case.inputs(300)
    q, k, v, beta = (inputs[name] for name in ("q", "k", "v", "beta"))
    with torch.no_grad():
        state, no_decay = case.state()[0], torch.zeros_like(beta[..., None])
        _, _, z, entering = module._run(q, k, k, no_decay, v, beta[..., None], state, 32, 1.0, True, False)
    assert z.numel() == entering.numel() == 0


def test_a_single_step_needs_no_chunk(monkeypatch):
    states = [case.state() for case in DELTA_CASES]
    monkeypatch.setattr(module, "chunked", lambda *_: pytest.fail("a decode step went to the chunked form"))
    for case, state in zip(DELTA_CASES, states, strict=True):
        case(case.inputs(1), state)


@every_delta_case
def test_the_state_is_float32_under_bfloat16_and_autocast(case):
    _, (state,) = case(case.inputs(70, torch.bfloat16))
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
        ({"v": (2, 6, 4, 3)}, r"got \[2, 7, 4, 6\], \[2, 7, 4, 6\] and \[2, 6, 4, 3\]"),
        ({"v": (2, 7, 6, 3)}, "6 value heads cannot be shared evenly by 4 key heads"),
        ({"q": (2, 0, 4, 6), "k": (2, 0, 4, 6), "v": (2, 0, 4, 3)}, "needs at least one time step"),
        ({"beta": (2, 7, 4, 1)}, r"beta must be \[2, 7, 4\], got \[2, 7, 4, 1\]"),
        ({"log_decay": (2, 7, 3)}, r"log_decay must be \[2, 7, 4\] or \[2, 7, 4, 6\], got \[2, 7, 3\]"),
        ({"state": (2, 4, 3, 6)}, r"state must be \[2, 4, 6, 3\], got \[2, 4, 3, 6\]"),
        ({"reset": (2, 6)}, r"reset must be \[2, 7\], got \[2, 6\]"),
        ({"reset": (2, 7)}, "reset must be a bool tensor, got torch.float32"),
    ],
)
def test_wrong_shapes_are_answered_in_a_sentence(changes, message):
    shapes = {"q": (2, 7, 4, 6), "k": (2, 7, 4, 6), "v": (2, 7, 4, 3), "beta": (2, 7, 4)} | changes
    with pytest.raises(ValueError, match=message):
        ops.delta_rule(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def test_wrong_options_are_answered_in_a_sentence():
    q, beta = torch.zeros(2, 7, 4, 6), torch.zeros(2, 7, 4)
    for wrong in ({"beta": None}, {"beta": beta, "erase": (q, q)}, {"beta": None, "erase": (q,)}):
        with pytest.raises(ValueError, match=r"either beta or erase=\(a, b\): give exactly one of them"):
            ops.delta_rule(q, q, q, **wrong)
    with pytest.raises(ValueError, match=r"erase\[1\] must be \[2, 7, 4, 6\], got \[2, 7, 4, 5\]"):
        ops.delta_rule(q, q, q, None, erase=(q, q[..., :5]))
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        ops.delta_rule(q, q, q, beta, chunk_size=0)
