"""What every op with every option must satisfy; the cases are in cases.py."""

from itertools import pairwise

import pytest
import torch

from ssm_trn import ops
from ssm_trn.ops.backends import select
from tests.ops.cases import ATTENTION, CASES, CONV, DELTA, LINEAR, LONG_CONV, SCAN, Case, Inputs, Sizes, State

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
EXACT = 1e-10  # in float64: two ways through the same sums

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; absolute where nothing is expected."""
    assert actual.shape == expected.shape
    actual, expected = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (actual, expected))
    norm = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(actual - expected).item() / (norm or 1.0)


def is_number(x: torch.Tensor) -> bool:
    """Positions in a cache are none."""
    return x.is_floating_point() or x.is_complex()


def numbers(state: State) -> list[torch.Tensor]:
    return [x for x in state if is_number(x)]


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64) if is_number(x) else x


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(is_number(x))


def each(function, tensors):
    """The function of each tensor of a dict of inputs or of a state."""
    if isinstance(tensors, dict):
        return {name: function(x) for name, x in tensors.items()}
    return tuple(function(x) for x in tensors)


def assert_same_state(case: Case, actual: State, expected: State, tolerance: float):
    if case.op in (ATTENTION, LONG_CONV):  # slots of a cache may differ that nobody sees
        more = case.inputs(3, seed=9, sizes=Sizes(batch=len(actual[0])))
        actual, expected = ([case(more, each(wide, state))[0]] for state in (actual, expected))
    for one, two in zip(actual, expected, strict=True):
        assert error(one, two) < tolerance


def loss(*results: torch.Tensor) -> torch.Tensor:
    """A random weight for each number."""
    generator = torch.Generator().manual_seed(7)
    total = 0.0
    for x in results:
        weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.real.dtype)
        total = total + (weights * x.real).sum() + ((weights * x.imag).sum() if x.is_complex() else 0.0)
    return total


def run_with_gradients(case: Case, inputs: Inputs, state=None, **options):
    """out and the numbers of the final state; the gradients of the inputs and of the initial state."""
    inputs, state = each(leaf, inputs), None if state is None else each(leaf, state)
    out, final = case(inputs, state, **options)
    results = [out, *numbers(final)]
    wanted = [*inputs.values(), *(numbers(state) if state is not None else [])]
    gradients = torch.autograd.grad(loss(*results), wanted, materialize_grads=True)
    return [x.detach() for x in results], list(gradients)


@every_case
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_equals_the_reference_in_float64(case, dtype):
    state = case.state(dtype)
    for length in (1, 7, 64, 65, 300):
        inputs = case.inputs(length, dtype)
        out, final = case(inputs, state)
        with ops.use_backend("reference"):
            expected, expected_final = case(each(wide, inputs), each(wide, state))
        assert out.dtype == dtype
        assert error(out, expected) < TOLERANCE[dtype]
        assert_same_state(case, final, expected_final, TOLERANCE[dtype])


@every_case
def test_gradients_equal_those_of_the_reference_in_float64(case):
    state = case.state(torch.float32)
    for length in (1, 7, 130):
        inputs = case.inputs(length, torch.float32)
        _, gradients = run_with_gradients(case, inputs, state)
        with ops.use_backend("reference"):
            _, expected = run_with_gradients(case, each(wide, inputs), each(wide, state))
        for actual, gradient in zip(gradients, expected, strict=True):
            assert error(actual, gradient) < TOLERANCE[torch.float32]


@every_case
@pytest.mark.parametrize("with_state", [False, True])
def test_any_split_equals_one_pass(case, with_state):
    length = 150
    inputs, initial = case.inputs(length), case.state() if with_state else None
    reset = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.02
    expected, expected_final = case(inputs, initial, reset=reset)
    random_cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(2))[:4].sort().values + 1
    for cuts in ([1], [64], [65], [3, 63, 128], [149], random_cuts.tolist()):
        state, pieces = initial, []
        for start, stop in pairwise([0, *cuts, length]):
            out, state = case(case.during(inputs, start, stop), state, reset=reset[:, start:stop])
            pieces.append(out)
        assert error(torch.cat(pieces, 1), expected) < EXACT
        assert_same_state(case, state, expected_final, EXACT)


@every_case
def test_step_by_step_equals_one_pass(case):
    length = 129  # two chunks of 64 and one step
    inputs = case.inputs(length, torch.float32)
    expected, expected_final = case(inputs)
    state, pieces = None, []
    for t in range(length):
        out, state = case(case.during(inputs, t, t + 1), state)
        pieces.append(out)
    assert error(torch.cat(pieces, 1), expected) < 1e-5
    assert_same_state(case, state, expected_final, 1e-5)


@every_case
def test_the_past_is_bitwise_the_same_whatever_the_future(case):
    length = 130
    inputs = case.inputs(length, torch.float32)
    other = case.inputs(length, torch.float32, seed=1)
    for name in ("log_decay", "dt"):
        if name in other:
            other[name] *= 50  # gates of another kind altogether
    for last in (0, 63, 64, 100):
        changed = {
            name: x if name in case.weights else torch.cat([x[:, : last + 1], other[name][:, last + 1 :]], 1)
            for name, x in inputs.items()
        }
        results = []
        for candidate in (each(leaf, inputs), each(leaf, changed)):
            out = case(candidate)[0][:, : last + 1]
            gradients = torch.autograd.grad(loss(out), [x for n, x in candidate.items() if n not in case.weights])
            results.append([out, *(x[:, : last + 1] for x in gradients)])
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two)


@every_case
def test_more_steps_do_not_change_the_first(case):
    inputs = case.inputs(200, torch.float32)
    out, _ = case(inputs)
    for length in (1, 40, 64, 130):
        prefix, _ = case(case.during(inputs, 0, length))
        assert error(prefix, out[:, :length]) < 1e-6


@every_case
def test_resets_equal_separate_runs(case):
    lengths = [1, 63, 64, 65, 130]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    inputs, sizes = case.inputs(offsets[-1], sizes=Sizes(batch=1)), Sizes(batch=1)
    reset = ops.resets_from(torch.tensor(offsets))
    packed, separate = each(leaf, inputs), each(leaf, inputs)
    state = case.state(sizes=sizes)  # the first reset wipes it out
    out, final = case(packed, state, reset=reset)
    pieces = [case(case.during(separate, start, stop)) for start, stop in pairwise(offsets)]
    expected = torch.cat([piece for piece, _ in pieces], 1)
    assert error(out, expected) < EXACT
    gradients = torch.autograd.grad(loss(out), list(packed.values()))
    expected_gradients = torch.autograd.grad(loss(expected), list(separate.values()))
    for actual, gradient in zip(gradients, expected_gradients, strict=True):
        assert error(actual, gradient) < EXACT
    assert_same_state(case, final, pieces[-1][1], EXACT)


@every_case
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("of", ["out", "state", "both"])
def test_gradcheck(case, with_state, of):
    sizes = Sizes(batch=1, heads=2, keys=4, values=3)
    inputs, state = each(leaf, case.inputs(9, sizes=sizes)), each(leaf, case.state(sizes=sizes)) if with_state else None
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, 6] = True
    options = {"reset": reset} | ({"chunk_size": 4} if case.op in (LINEAR, DELTA) else {})
    names, parts = list(inputs), [] if state is None else numbers(state)

    def function(*tensors):
        new, rest = dict(zip(names, tensors, strict=False)), list(tensors[len(names) :])
        initial = None if state is None else tuple(rest.pop(0) if is_number(x) else x for x in state)
        out, final = case(new, initial, **options)
        return {"out": (out,), "state": tuple(numbers(final)), "both": (out, *numbers(final))}[of]

    assert torch.autograd.gradcheck(function, (*inputs.values(), *parts), fast_mode=True)


@every_case
def test_gradcheck_of_a_single_step(case):
    """It has code of its own."""
    sizes = Sizes(batch=2, heads=2, keys=4, values=3)
    inputs, state = each(leaf, case.inputs(1, sizes=sizes)), each(leaf, case.state(sizes=sizes))
    reset, names = torch.tensor([[True], [False]]), list(inputs)

    def function(*tensors):
        new, rest = dict(zip(names, tensors, strict=False)), list(tensors[len(names) :])
        out, final = case(new, tuple(rest.pop(0) if is_number(x) else x for x in state), reset=reset)
        return out, *numbers(final)

    assert torch.autograd.gradcheck(function, (*inputs.values(), *numbers(state)), fast_mode=True)


@every_case
@pytest.mark.parametrize("keys", [1, 3, 60, 100])
def test_odd_sizes_inside_poisoned_buffers(case, keys):
    """Inputs are slices of buffers of NaN: whoever reads past an edge, or assumes contiguity, shows it."""
    for length in (1, 2, 7, 8, 9, 63, 64, 65, 127):
        inputs = each(leaf, case.inputs(length, torch.float32, sizes=Sizes(batch=1, heads=2, keys=keys)))
        poisoned = {}
        for name, x in inputs.items():
            inside = tuple(slice(1, size + 1) for size in x.shape)
            buffer = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
            buffer[inside] = x.detach()
            poisoned[name] = buffer.requires_grad_()[inside]
        results, expected = ([out, *numbers(state)] for out, state in (case(poisoned), case(inputs)))
        if length in (2, 9, 65):
            results += torch.autograd.grad(loss(*results), list(poisoned.values()))
            expected += torch.autograd.grad(loss(*expected), list(inputs.values()))
        for actual, part in zip(results, expected, strict=True):
            assert error(actual, part) < 1e-6


COMPILED = (
    "linear_attention-head-groups",
    "linear_attention-channel-bonus",
    "delta_rule-channel",
    "delta_rule-head-erase",
    "selective_scan-groups-skip",
    "selective_scan-complex-fixed",
    "short_conv-bias-silu",
    "long_conv",
    "attention-groups-window",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in COMPILED], ids=lambda case: case.name)
def test_compiles_without_a_graph_break(case):
    inputs, state = case.inputs(70, torch.float32), case.state(torch.float32)

    def run(inputs, state):
        out, final = case(inputs, state)
        return out, *numbers(final)

    torch.compiler.reset()
    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        new = each(leaf, inputs)
        outputs = function(new, each(leaf, state))
        results.append([*outputs, *torch.autograd.grad(loss(*outputs), list(new.values()))])
    for eager, compiled in zip(*results, strict=True):
        assert error(compiled, eager) < 1e-6


GATED = [case for case in CASES if case.op in (LINEAR, DELTA, SCAN) and {"log_decay", "dt"} & set(case.inputs(1))]
STRONG = [
    pytest.param(case, log_decay, id=f"{case.name}-{log_decay}")
    for case in GATED
    for log_decay in (-20.0, -60.0, -1e4, -torch.inf)
    # with negative eigenvalues a strong decay reflects the state
    if not case.options.get("negative_eigenvalues")
    # an infinite step of a scan that scales its input also writes an infinite one
    if log_decay > -torch.inf or case.op is not SCAN or not case.options.get("scale_input", True)
]


def strengthened(inputs: Inputs, log_decay: float, steps: slice) -> Inputs:
    """The inputs with this log decay at some steps."""
    inputs = each(torch.clone, inputs)
    if "log_decay" in inputs:
        inputs["log_decay"][:, steps] = log_decay
    else:
        inputs["A"] = inputs["A"] / -inputs["A"].real
        inputs["dt"][:, steps] = -log_decay
    return inputs


def assert_equals_reference(case: Case, inputs: Inputs, tolerance: float) -> torch.Tensor:
    """Of results and gradients; returns out."""
    results = sum(run_with_gradients(case, inputs), [])
    with ops.use_backend("reference"):
        expected = sum(run_with_gradients(case, each(wide, inputs)), [])
    for actual, part in zip(results, expected, strict=True):
        assert part.isfinite().all()
        assert error(actual, part) < tolerance
    return results[0]


@pytest.mark.parametrize(("case", "log_decay"), STRONG)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_strong_decay_at_every_step_leaves_the_present_token_alone(case, log_decay, dtype):
    inputs = strengthened(case.inputs(128, dtype), log_decay, slice(None))
    out = assert_equals_reference(case, inputs, TOLERANCE[dtype])
    if not case.reads_before_decay:
        alone = torch.cat([case(case.during(inputs, t, t + 1))[0] for t in range(128)], 1)
        assert error(out, alone) < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize(("case", "log_decay"), [p for p in STRONG if p.values[1] < -100])
def test_one_strong_decay_erases_what_came_before(case, log_decay):
    inputs = strengthened(case.inputs(128, torch.float32), log_decay, slice(70, 71))
    out = assert_equals_reference(case, inputs, TOLERANCE[torch.float32])
    if not case.reads_before_decay:
        assert error(out[:, 70:], case(case.during(inputs, 70, None))[0]) < 1e-6


def test_the_backend_is_chosen_by_name():
    """The kernels' in tests/ops/test_nki.py."""
    forms, cpu = {"reference": "loop", "torch": "chunks"}, torch.device("cpu")
    with pytest.raises(ValueError, match="unknown backend 'cuda': choose one of reference, torch, parallel, nki"):
        ops.use_backend("cuda").__enter__()
    with pytest.raises(ValueError, match="no op has an 'fla' form yet: use torch, which runs on a GPU too"):
        ops.use_backend("fla").__enter__()
    assert select("linear_attention", forms, cpu) == "chunks"
    with ops.use_backend("reference"):
        with ops.use_backend("torch"):
            assert select("linear_attention", forms, cpu) == "chunks"
        assert select("linear_attention", forms, cpu) == "loop"  # the inner choice ends with its block
    assert select("linear_attention", forms, cpu) == "chunks"


@pytest.mark.parametrize("case", [c for c in CASES if c.op in (CONV, LONG_CONV, ATTENTION)], ids=lambda case: case.name)
@pytest.mark.parametrize("length", [1, 9, 150])
def test_masked_equals_deleted(case, length):
    """Wherever the masked steps stand, whatever they hold, and however the run is split."""
    inputs, junk, state = case.inputs(length), case.inputs(length, seed=4), case.state()
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < 0.6

    def fill(name: str, x: torch.Tensor) -> torch.Tensor:
        return x if name in case.weights else torch.where(mask.reshape(2, length, *[1] * (x.dim() - 2)), x, junk[name])

    filled, final, pieces = {name: fill(name, x) for name, x in inputs.items()}, state, []
    for start, stop in pairwise(sorted({0, length // 2, length})):
        out, final = case(case.during(filled, start, stop), final, mask=mask[:, start:stop])
        pieces.append(out)
    out = torch.cat(pieces, 1)
    for row in range(2):
        only = slice(row, row + 1)
        kept = {name: x if name in case.weights else x[only, mask[row]] for name, x in inputs.items()}
        expected_final = each(lambda x, only=only: x[only], state)
        if mask[row].any():
            expected, expected_final = case(kept, expected_final)
            assert error(out[only, mask[row]], expected) < EXACT
        assert_same_state(case, each(lambda x, only=only: x[only], final), expected_final, EXACT)
