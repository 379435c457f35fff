"""The selective scan's kernels against the recurrence, step by step in float64."""

import numpy as np
import pytest
import torch

from ssm_nki import cycles
from ssm_nki.limits import supports
from ssm_nki.selective_scan import selective_scan_backward, selective_scan_forward
from ssm_nki.simulator import Machine
from tests.kernels.checks import BFLOAT16, FLOAT32, assert_near, case_id, every
from tests.kernels.pairwise import pairwise

NAMES = ("x", "dt", "A", "state", "B", "C", "D")  # in the order in which the backward kernel returns gradients

AXES = {
    "generation": ["gen2", "gen3"],
    "steps": [1, 64, 127, 128, 129, 300, 512],
    "least": [-1.0, -60.0],  # of the logarithm of a decay
    "states": [1, 3, 16],
    "without": ["", "reset", "B C D reset", "B", "C state"],
    "dtype": [FLOAT32, BFLOAT16],
}


def make(steps, least=-1.0, states=3, without="", dtype=FLOAT32, batch=1, channels=5):
    """Inputs of the kernels by name, rounded to their types; those named in `without` are None."""
    random = np.random.default_rng(0)
    normal, shape = random.standard_normal, (batch, steps, channels)
    inputs = {
        "x": normal(shape).astype(dtype),
        "dt": random.random(shape).astype(FLOAT32),
        "A": (least * random.random((channels, states)) ** 4).astype(FLOAT32),  # mostly slow, between fast ones
        "state": normal((batch, channels, states)).astype(FLOAT32),
        "B": normal((batch, steps, states)).astype(dtype),
        "C": normal((batch, steps, states)).astype(dtype),
        "D": normal(channels).astype(FLOAT32),
        "reset": (random.random((batch, steps)) < 0.03).astype(FLOAT32),
    }
    inputs["reset"][:, :4] = 0  # so that the initial state gets a gradient
    return {name: None if name in without.split() else value for name, value in inputs.items()}


def recurrence(x, dt, A, state, B, C, D, reset, scale_input):
    """y and the last state, of tensors in float64."""
    decays = torch.exp(dt[..., None] * A)
    if reset is not None:
        decays = decays * (1 - reset)[..., None, None]
    written = (dt * x if scale_input else x)[..., None]
    written = (written if B is None else written * B[:, :, None]).expand_as(decays)
    outputs = []
    for t in range(x.shape[1]):
        state = decays[:, t] * state + written[:, t]
        outputs.append((state if C is None else state * C[:, t, None]).sum(-1))
    y = torch.stack(outputs, 1)
    return (y if D is None else y + D * x), state


def expected(inputs, grad_y, grad_last, scale_input):
    """y, the last state, and the gradients of the inputs, float64 by name."""
    tensors = {name: None if x is None else torch.tensor(x.astype(np.float64)) for name, x in inputs.items()}
    if tensors["state"] is None:
        tensors["state"] = torch.zeros(grad_last.shape, dtype=torch.float64)
    wanted = {name: tensors[name].requires_grad_() for name in NAMES if tensors[name] is not None}
    y, last = recurrence(**tensors, scale_input=scale_input)
    gradients = [torch.tensor(grad.astype(np.float64)) for grad in (grad_y, grad_last)]
    grads = torch.autograd.grad([y, last], list(wanted.values()), gradients)
    results = {"y": y, "last": last} | {f"grad_{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {name: x.detach().numpy() for name, x in results.items()}


def simulated(inputs, grad_y, grad_last, scale_input, generation="gen2"):
    """The same by the kernels."""
    machine = Machine(generation)
    y, last, entering = machine.run(selective_scan_forward, **inputs, scale_input=scale_input, keep=True)
    kept = {name: value for name, value in inputs.items() if name != "state"}
    grads = machine.run(selective_scan_backward, grad_y, grad_last, **kept, entering=entering, scale_input=scale_input)
    names = [name for name in NAMES if inputs[name] is not None or name == "state"]
    return {"y": y, "last": last} | {f"grad_{name}": grad for name, grad in zip(names, grads, strict=True)}


def check(inputs, generation="gen2", scale_input=True):
    """Every result is near enough to the recurrence's."""
    random = np.random.default_rng(1)
    grad_y = random.standard_normal(inputs["x"].shape).astype(inputs["x"].dtype)
    grad_last = random.standard_normal((len(grad_y), *inputs["A"].shape)).astype(FLOAT32)
    found = simulated(inputs, grad_y, grad_last, scale_input, generation)
    assert_near(found, expected(inputs, grad_y, grad_last, scale_input), inputs["x"].dtype)


def _check_case(generation, without, **sizes):
    check(make(without=without, **sizes), generation, scale_input="B C" not in without)


@pytest.mark.parametrize("case", pairwise(**AXES), ids=case_id)
def test_pairs(case):
    _check_case(**case)


@pytest.mark.kernels
@pytest.mark.parametrize("case", every(**AXES), ids=case_id)
def test_cross_product(case):
    _check_case(**case)


def test_more_than_one_tile_of_everything():
    check(make(150, states=5, batch=2, channels=130))


def test_the_most_states():
    check(make(129, states=64, channels=2))


def test_more_channels_than_are_read_out_together():
    check(make(130, states=2, channels=650))


def test_several_tiles_of_time():
    check(make(700, states=2, without="state"))


def test_a_split_of_time_changes_nothing():
    whole = make(150, without="D reset")
    y, last = Machine().run(selective_scan_forward, **whole)
    parts, state = [], whole["state"]
    for piece in (slice(0, 1), slice(1, 140), slice(140, 150)):
        inputs = {name: whole[name][:, piece] for name in ("x", "dt", "B", "C")}
        part, state = Machine().run(selective_scan_forward, **inputs, A=whole["A"], state=state)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, 1), y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_a_reset_forgets_whatever_the_rate_is():
    inputs = make(40, least=0.0)  # nothing decays
    inputs["A"][1:] = -1e-9
    inputs["reset"][:] = 0
    inputs["reset"][:, 30] = 1
    y, last = Machine().run(selective_scan_forward, **inputs)
    late = {name: inputs[name][:, 30:] for name in ("x", "dt", "B", "C")}
    alone, last_alone = Machine().run(selective_scan_forward, **late, A=inputs["A"], D=inputs["D"])
    np.testing.assert_allclose(y[:, 30:], alone, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(last, last_alone, rtol=1e-6, atol=1e-6)


def test_an_endless_step_of_a_gated_recurrence_erases():
    inputs = make(140, states=1, without="B C D reset")
    inputs["A"] -= 0.1
    inputs["dt"][:, 100] = 1e30  # as the torch op cuts infinity
    check(inputs, scale_input=False)


def test_limits_are_told():
    kernel, dtypes = "selective_scan", {"x": "bfloat16"}
    assert supports(kernel, {"A": (2048, 64)}, dtypes)
    assert supports(kernel, {"A": (2048, 65)}, dtypes).limit.endswith("at most 64 states for each channel, not 65")
    assert supports(kernel, {"A": (8320, 16)}, dtypes).limit.endswith("at most 8192 channels, not 8320")


@pytest.mark.kernels
@pytest.mark.parametrize("states, steps", [(64, 129), (16, 513)])
def test_the_largest_sizes_fit(states, steps):
    inputs = make(steps, states=states, channels=8192)
    machine = Machine("gen2", compute=False)
    state = inputs["state"]
    _, _, entering = machine.run(selective_scan_forward, **inputs, keep=True)
    del inputs["state"]
    machine.run(selective_scan_backward, inputs["x"], state, **inputs, entering=entering)


@pytest.mark.parametrize(
    "kernel, dtype, milliseconds",
    [("forward", FLOAT32, 2.15), ("forward", BFLOAT16, 2.15), ("backward", FLOAT32, 9.0), ("backward", BFLOAT16, 9.0)],
)
def test_modelled_time_on_trn1(kernel, dtype, milliseconds):
    """A sixteenth of the work of T = D = 2048 takes at most a sixteenth of the target."""
    inputs = make(512, states=16, dtype=dtype, channels=512, without="reset")
    machine = Machine("gen2", compute=False)
    results = machine.run(selective_scan_forward, **inputs, keep=True)
    if kernel == "backward":
        del inputs["state"]
        machine.run(selective_scan_backward, inputs["x"], None, **inputs, entering=results[2])
    assert 16 * cycles.cost(machine.trace).microseconds < 1000 * milliseconds
