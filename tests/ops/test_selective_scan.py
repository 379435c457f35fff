"""What is special to the selective scan; tests/ops/test_properties.py holds what all ops must satisfy."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from ssm_trn import ops
from ssm_trn.ops.scan_blocks import _scan, _scan_backward

EXACT = 1e-10


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(batch: int, length: int, channels: int, states: int, groups: int = 1, dtype=torch.float64) -> dict:
    return {
        "x": normal(batch, length, channels, seed=0, dtype=dtype),
        "dt": F.softplus(normal(batch, length, channels, seed=1, dtype=dtype) - 2),
        "A": -torch.exp(normal(channels, states, seed=2, dtype=dtype)),
        "B": normal(batch, length, groups, states, seed=3, dtype=dtype),
        "C": normal(batch, length, groups, states, seed=4, dtype=dtype),
        "D": normal(channels, seed=5, dtype=dtype),
    }


def leaves(tensors: dict) -> dict:
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return (torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)).item()


def assert_same_with_gradients(one, two, tensors: dict):
    """Two functions of the same inputs have the same results and gradients."""
    outcomes = []
    for function in (one, two):
        new = leaves(tensors)
        results = function(**new)
        total = sum((normal(*y.shape, seed=9) * y).sum() for y in results)
        outcomes.append([*results, *torch.autograd.grad(total, list(new.values()))])
    for actual, expected in zip(*outcomes, strict=True):
        assert error(actual, expected) < EXACT


@pytest.mark.parametrize("length", [7, 65, 300])
def test_equals_mambapy(length):
    pscan = pytest.importorskip("mambapy.pscan").pscan

    def mambapy(x, dt, A, B, C, D):
        decay = torch.exp(dt[..., None] * A)
        states = pscan(decay, dt[..., None] * B * x[..., None])  # [B, T, D, N]
        return (states @ C[:, :, 0, :, None])[..., 0] + D * x, states[:, -1]

    assert_same_with_gradients(ops.selective_scan, mambapy, inputs(2, length, 6, 4))


@pytest.mark.parametrize("length", [1, 7, 65, 300])
def test_equals_transformers(length):
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    scan = getattr(modeling, "mamba_selective_scan", None)
    if scan is None:
        pytest.skip("this version of transformers has its scan inside the mixer")

    def transformers(x, dt, A, B, C, D):
        y, state = scan(x.mT, dt.mT, A, B[:, :, 0].mT, C[:, :, 0].mT, D, return_last_state=True)
        return y.mT, state

    tensors = inputs(2, length, 6, 4, dtype=torch.float32)  # their loop rounds B to float32
    y, state = ops.selective_scan(**tensors)
    expected, expected_state = transformers(**tensors)
    assert error(y, expected) < 1e-6
    assert error(state, expected_state) < 1e-6


def test_complex_and_fixed_is_the_convolution_of_s4d():
    length, channels, states = 90, 5, 4
    x, D = normal(2, length, channels), normal(channels, seed=1)
    A = torch.complex(-torch.exp(normal(channels, states, seed=6)), normal(channels, states, seed=7) * math.pi)
    B, C = (torch.complex(normal(channels, states, seed=s), normal(channels, states, seed=s + 1)) for s in (2, 4))
    dt = 0.1
    y, _ = ops.selective_scan(x, torch.full_like(x, dt), A, B, C, D)
    powers = torch.exp(dt * A[..., None] * torch.arange(length))  # [D, N, T]
    kernel = 2 * torch.einsum("dn,dn,dnt->dt", C, dt * B, powers).real
    expected = F.conv1d(x.mT, kernel.flip(1)[:, None], padding=length - 1, groups=channels)[..., :length].mT + D * x
    assert error(y, expected) < EXACT


def test_one_state_without_b_and_c_is_a_gated_rnn():
    z, candidate, h = torch.sigmoid(normal(2, 40, 3)), normal(2, 40, 3, seed=1), normal(2, 3, seed=2)
    y, final = ops.selective_scan(
        (1 - z) * candidate, -torch.log(z), -torch.ones(3, 1).double(), scale_input=False, state=h[..., None]
    )
    for t in range(40):
        h = z[:, t] * h + (1 - z[:, t]) * candidate[:, t]
        assert error(y[:, t], h) < EXACT
    assert error(final[..., 0], h) < EXACT


def test_groups_of_channels_are_scans_of_their_own():
    tensors = inputs(2, 30, 6, 4, groups=3)
    y, state = ops.selective_scan(**tensors)
    for group in range(3):
        channels = slice(2 * group, 2 * group + 2)
        part = {name: tensors[name][..., channels] for name in ("x", "dt", "D")}
        part |= {name: tensors[name][:, :, group : group + 1] for name in ("B", "C")}
        y_part, state_part = ops.selective_scan(A=tensors["A"][channels], **part)
        assert error(y[..., channels], y_part) < EXACT
        assert error(state[:, channels], state_part) < EXACT


@pytest.mark.parametrize("b", ["steps", "fixed", "none", "complex"])
@pytest.mark.parametrize("c", ["steps", "fixed", "none", "complex"])
@pytest.mark.parametrize("d", [True, False])
def test_gradcheck_of_every_kind_of_b_c_and_d(b, c, d):
    tensors = inputs(2, 5, 4, 3, groups=2)
    fixed = {"B": normal(4, 3, seed=6), "C": normal(4, 3, seed=7)}
    for name, kind in (("B", b), ("C", c)):
        if kind == "none":
            del tensors[name]
        elif kind == "fixed":
            tensors[name] = fixed[name]
        elif kind == "complex":
            tensors[name] = torch.complex(fixed[name], normal(4, 3, seed=8))
    if not d:
        del tensors["D"]
    names = list(tensors)
    state = normal(2, 4, 3, seed=10)
    reset = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)

    def function(state, *values):
        return ops.selective_scan(**dict(zip(names, values, strict=True)), state=state, reset=reset)

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (state, *tensors.values())], fast_mode=True)


@pytest.mark.parametrize("channels", [2500, 700])  # 1 or 2 rows in a block, 6 or 11 steps: neither divides
def test_blocks_that_do_not_divide_batch_and_time(channels):
    tensors = inputs(3, 25, channels, 8)
    reset = torch.rand(3, 25, generator=torch.Generator().manual_seed(0)) < 0.1

    def blocked(**tensors):
        return ops.selective_scan(**tensors, reset=reset)

    def reference(**tensors):
        with ops.use_backend("reference"):
            return ops.selective_scan(**tensors, reset=reset)

    assert_same_with_gradients(blocked, reference, tensors)


def test_a_reset_is_exact_where_nothing_decays():
    """A = 0 makes exp(dt A) = 1 for any dt: the reset must not rest on the decay."""
    tensors = inputs(1, 50, 3, 2) | {"A": torch.zeros(3, 2).double()}
    reset = torch.zeros(1, 50, dtype=torch.bool)
    reset[0, 20] = True
    y, state = ops.selective_scan(**tensors, reset=reset, state=normal(1, 3, 2))
    later = {name: x[:, 20:] if x.dim() > 2 else x for name, x in tensors.items()}
    y_later, state_later = ops.selective_scan(**later)
    torch.testing.assert_close(y[:, 20:], y_later, rtol=0, atol=0)
    torch.testing.assert_close(state, state_later, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_an_infinite_step_erases(backend):
    """And where it has nothing to write, all is finite."""
    tensors = inputs(1, 50, 3, 2, dtype=torch.float32)
    tensors["dt"][:, 20] = torch.inf
    tensors["x"][:, 20] = 0
    later = {name: x[:, 21:] if x.dim() > 2 else x for name, x in tensors.items()}
    new = leaves(tensors)
    with ops.use_backend(backend):
        y, _ = ops.selective_scan(**new)
        expected, _ = ops.selective_scan(**later)
    assert error(y[:, 21:], expected) < 1e-6
    for gradient in torch.autograd.grad(y.sum(), list(new.values())):
        assert gradient.isfinite().all()


def test_a_product_of_dt_and_a_that_overflows_is_a_full_decay():
    x, huge = normal(1, 40, 3, dtype=torch.float32), torch.full((1, 40, 3), 1e20)
    new = leaves({"x": x, "dt": huge, "A": torch.full((3, 2), -1e20)})
    y, state = ops.selective_scan(**new, scale_input=False)
    assert torch.equal(y, 2 * x)
    assert torch.equal(state, x[:, -1, :, None].expand(-1, -1, 2))
    for gradient in torch.autograd.grad(y.sum() + state.sum(), list(new.values())):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("length", [1, 70])
def test_bfloat16_and_autocast_keep_gates_and_state_in_float32(length):
    tensors = inputs(2, length, 8, 4, dtype=torch.float32)
    x, state = tensors.pop("x").bfloat16(), normal(2, 8, 4, dtype=torch.float32)
    expected, expected_final = ops.selective_scan(x.float(), **tensors, state=state)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, final = ops.selective_scan(x, **tensors, state=state)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, expected.bfloat16())
        assert torch.equal(final, expected_final)


def test_gradients_under_autocast_are_float32():
    tensors = inputs(2, 70, 8, 4, dtype=torch.float32)
    gradients = []
    for enabled in (False, True):
        new = leaves(tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(ops.selective_scan(**new)[0].sum(), list(new.values())))
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two)


def test_two_backward_passes_through_one_graph_agree():
    """No buffer of the first pass may be part of what it returned or of what the second one needs."""
    new = leaves(inputs(2, 40, 6, 4))
    y, state = ops.selective_scan(**new)
    y, _ = ops.selective_scan(y, *list(new.values())[1:], state=state)
    first, second = (torch.autograd.grad(y.sum(), list(new.values()), retain_graph=True) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


def test_training_keeps_inputs_and_few_states():
    """[B, T, D, N] would be 16 times the input."""
    new = leaves(inputs(1, 2048, 64, 16, dtype=torch.float32))
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ops.selective_scan(**new)
    given = sum(x.nbytes for x in new.values())
    assert given < sum(kept.values()) < 1.5 * given


def test_operators_keep_the_contract_of_custom_operators():
    tensors = inputs(2, 20, 6, 4)
    state, reset = normal(2, 6, 4), torch.zeros(2, 20, dtype=torch.bool)
    arguments = [x.requires_grad_() for x in tensors.values()]
    opcheck(_scan, (*arguments, state, reset, True, False, True))
    x, *weights = (x.detach() for x in arguments)
    y, final, entering = _scan(x, *weights, state, reset, True, False, True)
    opcheck(_scan_backward, (y, final, x, *weights, entering, reset, True, False))


def test_inference_keeps_one_state_for_all_blocks():
    tensors = inputs(3, 20, 700, 8).values()
    state = normal(3, 700, 8)
    (*kept, entering), (*streamed, last) = (_scan(*tensors, state, None, True, False, keep) for keep in (True, False))
    for one, two in zip(kept, streamed, strict=True):
        assert torch.equal(one, two)
    assert len(entering) == 3  # before, between and after two blocks
    assert len(last) == 1


def test_the_number_of_threads_is_as_before():
    count = torch.get_num_threads()
    try:
        torch.set_num_threads(count + 1)
        new = leaves(inputs(1, 20, 4, 2))
        ops.selective_scan(**new)[0].sum().backward()
        assert torch.get_num_threads() == count + 1
    finally:
        torch.set_num_threads(count)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 0, 6)}, r"x must be \[batch, time >= 1, channels\], got \[2, 0, 6\]"),
        ({"x": torch.zeros(5, 6)}, "x must be"),
        ({"dt": torch.zeros(2, 5, 1)}, r"dt must have the shape of x, \[2, 5, 6\], got \[2, 5, 1\]"),
        ({"A": torch.zeros(5, 4)}, r"A must be \[channels = 6, states\], got \[5, 4\]"),
        ({"B": torch.zeros(2, 5, 4, 4)}, r"B must be \[2, 5, groups, 4\] with groups that divide 6 channels"),
        ({"C": torch.zeros(2, 5, 4)}, r"C must be \[2, 5, groups, 4\]"),
        ({"C": torch.zeros(2, 5, 2, 4)}, "B and C must have the same number of groups, got 1 and 2"),
        ({"D": torch.zeros(6, 1)}, r"D must be \[channels = 6\], got \[6, 1\]"),
        ({"reset": torch.zeros(2, 5)}, r"reset must be bool \[2, 5\], got torch.float32 \[2, 5\]"),
        ({"reset": torch.zeros(2, 4, dtype=torch.bool)}, "reset must be bool"),
        ({"state": torch.zeros(2, 4, 6)}, r"state must be \[2, 6, 4\], got \[2, 4, 6\]"),
        ({"state": torch.zeros(2, 6, 4, dtype=torch.complex64)}, "the state is complex but A, B and C are real"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        ops.selective_scan(**inputs(2, 5, 6, 4) | change)
