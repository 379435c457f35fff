"""The NKI kernels as forms of the ops: simulated, they equal the torch forms, alone and in a model that trains."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import ssm_nki
from ssm_nki import sdk
from ssm_trn import LanguageModel, ModelConfig, ops
from ssm_trn.ops import backends, nki, nki_operators
from tests.ops.cases import ATTENTION, CASES, LONG_CONV, Sizes
from tests.ops.test_properties import each, error, loss, run_with_gradients

NAMED = {case.name: case for case in CASES}
REFUSED = {
    "linear_attention-head-bonus": "no option bonus",
    "linear_attention-channel-bonus": "no option bonus",
    "delta_rule-head-erase": "no option erase",
    "delta_rule-channel-erase": "no option erase",
    "selective_scan-groups-skip": "takes B for each step and in one group only",
    "selective_scan-fixed": "takes B for each step and in one group only",
    "selective_scan-negative": "no option negative_eigenvalues",
    "selective_scan-complex": "A is complex64",
    "selective_scan-complex-fixed": "takes B for each step and in one group only",
    "attention": "attention has no NKI kernel",
    "long_conv": "long_conv has no NKI kernel",
}
KERNEL_CASES = [case for case in CASES if case.name not in REFUSED and case.op not in (ATTENTION, LONG_CONV)]
BFLOAT16 = ("linear_attention-head-groups", "delta_rule-channel", "selective_scan", "short_conv-bias-silu")
LENGTH = 140  # one whole chunk and a part of one


@pytest.fixture
def calls(monkeypatch):
    """The kernels that ran, with warnings as errors: nothing falls back unseen."""
    names, run = [], nki_operators._run

    def record(kernel, *arguments, **options):
        names.append(kernel)
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(nki_operators, "_run", record)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield names


@pytest.fixture
def warned(monkeypatch):
    """What was warned of; each test starts as a new process does."""
    monkeypatch.setattr(backends, "_warned", set())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def some(length, fraction=0.05, batch=2):
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < fraction


def assert_equals_torch(case, inputs, state, tolerance, **options):
    """Results, and gradients of all inputs and of the initial state."""
    with ops.use_backend("nki"):
        found = run_with_gradients(case, inputs, state, **options)
    with ops.use_backend("torch"):
        expected = run_with_gradients(case, inputs, state, **options)
    for ours, theirs in zip(sum(found, []), sum(expected, []), strict=True):
        assert ours.dtype == theirs.dtype
        assert theirs.isfinite().all()
        assert error(ours, theirs) < tolerance


@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_equals_the_torch_form(case, calls):
    """With an initial state, and documents that begin anywhere."""
    state = case.state(torch.float32)
    for length, reset in ((LENGTH, some(LENGTH)), (20, None)):
        assert_equals_torch(case, case.inputs(length, torch.float32), state, 1e-5, reset=reset)
    forward = case.op.__name__ + "_forward"
    assert calls == 2 * [forward, case.op.__name__ + "_backward"]


@pytest.mark.parametrize("name", BFLOAT16)
def test_equals_the_torch_form_in_bfloat16(name, calls):
    case = NAMED[name]
    inputs, state = case.inputs(LENGTH, torch.bfloat16), case.state(torch.bfloat16)
    assert_equals_torch(case, inputs, state, 2e-2, reset=some(LENGTH))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "name", ["linear_attention-head", "linear_attention-channel", "delta_rule-head", "delta_rule-channel"]
)
def test_log_decays_of_minus_infinity_and_below_what_float32_holds(name, calls):
    case = NAMED[name]
    inputs = case.inputs(30, torch.float32)
    inputs["log_decay"][:, [0, 17]] = -torch.inf
    inputs["log_decay"][:, 20:24] = -1e4
    assert_equals_torch(case, inputs, case.state(torch.float32), 1e-5)


def test_infinite_steps_of_the_scan(calls):
    case = NAMED["selective_scan-unscaled"]
    inputs = case.inputs(30, torch.float32)
    inputs["dt"][:, [0, 17]] = torch.inf
    assert_equals_torch(case, inputs, case.state(torch.float32), 1e-5)


@pytest.mark.parametrize("name", [*BFLOAT16, "linear_attention", "selective_scan-gated-rnn", "short_conv-one-tap"])
def test_any_split_equals_one_pass_without_gradients(name, calls):
    """A chunk, less than a chunk, one step (which is no kernel's), a few steps; no initial state."""
    case = NAMED[name]
    inputs = case.inputs(150, torch.float32)
    expected, expected_final = case(inputs)
    state, pieces = None, []
    with torch.no_grad(), ops.use_backend("nki"):
        for start, stop in ((0, 128), (128, 140), (140, 141), (141, 150)):
            out, state = case(case.during(inputs, start, stop), state)
            pieces.append(out)
    assert calls == 3 * [case.op.__name__ + "_forward"]
    assert error(torch.cat(pieces, 1), expected) < 1e-5
    assert error(state[0], expected_final[0]) < 1e-5


@pytest.mark.parametrize("name", ["linear_attention-head", "delta_rule-head", "selective_scan"])
@pytest.mark.parametrize("wanted", [0, 1], ids=["out", "state"])
def test_gradients_of_one_of_the_results_alone(name, wanted, calls):
    case, gradients = NAMED[name], {}
    for backend in ("nki", "torch"):
        inputs = each(lambda x: x.clone().requires_grad_(), case.inputs(20, torch.float32))
        with ops.use_backend(backend):
            out, (final,) = case(inputs)
        total = loss((out, final)[wanted])
        gradients[backend] = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
    for ours, theirs in zip(*gradients.values(), strict=True):
        assert error(ours, theirs) < 1e-5


def test_inputs_of_several_types(calls):
    """The kernels take activations of one type: the wider one."""
    case = NAMED["linear_attention-head"]
    inputs = case.inputs(20, torch.float32)
    inputs["q"], inputs["log_decay"] = inputs["q"].bfloat16(), inputs["log_decay"].bfloat16()
    assert_equals_torch(case, inputs, None, 1e-2)


@pytest.mark.parametrize("name", [*BFLOAT16, "linear_attention", "selective_scan-gated-rnn", "short_conv-one-tap"])
@pytest.mark.parametrize(
    ("length", "checks"),
    [(130, ["test_faketensor"]), (3, ["test_schema", "test_autograd_registration", "test_aot_dispatch_dynamic"])],
    ids=["shapes", "registration"],
)
def test_the_operators_are_what_torch_expects(name, length, checks, monkeypatch):
    """With and without optional inputs."""
    case, seen = NAMED[name], {}
    forward, backward = (getattr(nki_operators, case.op.__name__ + suffix) for suffix in ("", "_backward"))

    def record(operator):
        def call(*inputs):
            seen[operator] = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
            return operator(*inputs)

        return call

    with monkeypatch.context() as patch, ops.use_backend("nki"):
        patch.setattr(nki, case.op.__name__, record(forward))
        patch.setattr(nki_operators, case.op.__name__ + "_backward", record(backward))
        run_with_gradients(case, case.inputs(length, torch.float32, sizes=Sizes(batch=1, heads=2)))
    for x in seen[forward]:
        if isinstance(x, torch.Tensor):
            x.requires_grad_(x.is_floating_point())
    for operator in (forward, backward):
        torch.library.opcheck(operator, seen[operator], test_utils=checks)


@pytest.mark.parametrize("name", ["delta_rule-channel", "linear_attention-head-bonus"])
def test_torch_compile_takes_a_kernel_whole_and_chooses_as_without_it(name, warned):
    case = NAMED[name]
    inputs = each(lambda x: x.requires_grad_(), case.inputs(20, torch.float32))
    counter = CompileCounterWithBackend("aot_eager")

    def total(inputs):
        out, (final,) = case(inputs)
        return out.square().sum() + final.square().sum()

    torch.compiler.reset()
    compiled = torch.compile(total, fullgraph=True, backend=counter)
    expected = torch.autograd.grad(total(inputs), list(inputs.values()))
    with ops.use_backend("nki"):
        found = torch.autograd.grad(compiled(inputs), list(inputs.values()))
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 1e-5
    called = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("nki_" in target for target in called) == (name not in REFUSED)
    assert len([w for w in warned if w.category is RuntimeWarning]) == (name in REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_lack_runs_as_torch_with_one_warning(name, warned):
    case = NAMED[name]
    inputs = case.inputs(9, torch.float32)
    with ops.use_backend("nki"):
        out, _ = case(inputs)
        assert torch.equal(case(inputs)[0], out)
    assert error(case(inputs)[0], out) < 1e-6  # the long convolution calls the short one, which has a kernel
    (warning,) = warned
    assert warning.category is RuntimeWarning and REFUSED[name] in str(warning.message)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_float64_runs_as_torch(case, warned):
    inputs = case.inputs(9)
    with ops.use_backend("nki"):
        out, _ = case(inputs)
    assert torch.equal(out, case(inputs)[0])
    message = f"{case.op.__name__} runs in its torch form: its NKI kernel takes float32 and bfloat16"
    assert message in str(warned[0].message)


def test_accelerators_without_kernels_get_the_parallel_form():
    forms = {"reference": "loop", "torch": "chunks", "parallel": "at once"}
    xla, cpu = torch.device("xla"), torch.device("cpu")
    assert backends.select("delta_rule", forms, xla) == "at once"
    assert backends.select("delta_rule", forms, cpu) == "chunks"
    with ops.use_backend("torch"):  # its custom operators would be wrong there
        assert backends.select("delta_rule", forms, xla) == "at once"
    with ops.use_backend("reference"):
        assert backends.select("delta_rule", forms, xla) == "loop"
    assert backends.select("attention", {"torch": "fused"}, xla) == "fused"  # made of PyTorch's own operators


def test_complex_numbers_are_refused_where_there_are_none(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    backends.require_complex(torch.device("xla"))
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    backends.require_complex(torch.device("cpu"))
    with pytest.raises(ValueError, match="NeuronCores have no complex numbers, which lru and s4d compute with: choose"):
        backends.require_complex(torch.device("xla"))


def test_a_single_step_is_no_kernels(calls):
    with ops.use_backend("nki"):
        for case in KERNEL_CASES:
            case(case.inputs(1, torch.float32))
    assert calls == []


def too_large():
    """Calls beyond a limit, and the sentence that names it."""
    wide, long = torch.ones(1, 2, 1, 129), torch.ones(1, 2, 1, 513)
    x = torch.ones(1, 2, 1)
    return [
        (ops.linear_attention, (wide, wide, x[..., None]), "at most 128 key channels, not 129"),
        (ops.linear_attention, (x[..., None], x[..., None], long), "at most 512 value channels, not 513"),
        (ops.delta_rule, (x[..., None], x[..., None], wide, x), "at most 128 value channels, not 129"),
        (ops.selective_scan, (x, x, -torch.ones(1, 65)), "at most 64 states for each channel, not 65"),
        (ops.short_conv, (x, torch.ones(1, 33)), "at most 32 taps, not 33"),
    ]


@pytest.mark.parametrize(("op", "arguments", "limit"), too_large(), ids=lambda x: x if isinstance(x, str) else "")
def test_a_size_that_is_too_large(op, arguments, limit, warned, monkeypatch):
    """Of a kernel that was asked for it is an error; of one that the device chose it is not."""
    message = f"the kernel of {op.__name__} has {limit}"
    with ops.use_backend("nki"), pytest.raises(ValueError, match=f"^{message}; the torch backend has no such limit$"):
        op(*arguments)
    assert not warned
    monkeypatch.setattr(backends, "ACCELERATORS", ("cpu",))
    for _ in range(2):
        op(*arguments)
    assert [str(w.message) for w in warned] == [f"{op.__name__} runs in its parallel form: {message}"]


def test_the_limits_can_be_asked_for():
    shapes = {"k": (1, 300, 2, 128), "v": (1, 300, 4, 128)}
    assert ssm_nki.supports("delta_rule", shapes, {"k": "bfloat16", "v": "bfloat16"})
    answer = ssm_nki.supports("delta_rule", shapes | {"k": (1, 300, 2, 256)}, {})
    assert not answer and answer.limit == "the kernel of delta_rule has at most 128 key channels, not 256"
    assert "v is float64" in ssm_nki.supports("delta_rule", shapes, {"v": "float64"}).limit
    assert "k bfloat16, v float32" in ssm_nki.supports("delta_rule", shapes, {"k": "bfloat16", "v": "float32"}).limit
    with pytest.raises(ValueError, match="no kernel 'attention'; there are linear_attention, "):
        ssm_nki.supports("attention", {}, {})


def test_kernels_run_unasked_on_an_accelerator_only(calls, monkeypatch):
    case = NAMED["short_conv"]
    inputs = case.inputs(9, torch.float32)
    case(inputs)
    assert calls == []
    monkeypatch.setattr(backends, "ACCELERATORS", ("cpu",))
    case(inputs)
    assert calls == ["short_conv_forward"]
    for other in ("torch", "reference"):
        with ops.use_backend(other):
            case(inputs)
    assert len(calls) == 1


def test_why_there_are_no_kernels_on_a_device(monkeypatch):
    absence = {name: torch.device(name) for name in ("cpu", "xla", "meta", "cuda")}
    assert backends._absence(absence["cpu"]) is backends._absence(absence["meta"]) is None
    assert "not cuda tensors" in backends._absence(absence["cuda"])
    assert "the Neuron SDK is not installed" in backends._absence(absence["xla"])
    monkeypatch.setattr(sdk, "REAL", True)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert backends._absence(absence["xla"]) is None
    assert "SSM_NKI_SIMULATE=1" in backends._absence(absence["cpu"])
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert "PJRT_DEVICE=CPU" in backends._absence(absence["xla"])


def test_an_accelerator_without_the_sdk_computes_in_parallel_and_says_why(warned, monkeypatch):
    case = NAMED["delta_rule-head"]
    inputs = case.inputs(9, torch.float32)
    monkeypatch.setattr(backends, "ACCELERATORS", ("cpu",))
    monkeypatch.setattr(backends, "_absence", lambda device: "the Neuron SDK is not installed")
    for _ in range(2):
        out, _ = case(inputs)
    assert [str(w.message) for w in warned] == ["delta_rule runs in its parallel form: the Neuron SDK is not installed"]
    with ops.use_backend("parallel"):
        assert torch.equal(out, case(inputs)[0])


def test_the_simulator_is_not_imported_before_it_is_wanted():
    code = "import sys, ssm_trn.ops; print([name for name in sys.modules if 'ssm_nki.s' in name])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# A model that trains.

FAMILIES = {
    "mamba": {"mixer": "mamba", "d_state": 4},
    "mamba2": {"mixer": "mamba2", "d_state": 8, "head_dim": 16},
    "gla": {"mixer": "gla", "n_heads": 2, "gate_rank": 4},
    "gated_deltanet": {"mixer": "gated_deltanet", "n_heads": 2},
    "kda": {"mixer": "kda", "n_heads": 2},
}


def tiny_model(family):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocab_size=30, d_model=16, layers=[FAMILIES[family]] * 2))


def loss_curve(family, backend, steps, length):
    """The losses of a short training on one batch of packed documents."""
    model = tiny_model(family)
    tokens = torch.randint(30, (1, length + 1), generator=torch.Generator().manual_seed(1))
    reset = some(length, 0.02, batch=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with ops.use_backend(backend):
        for _ in range(steps):
            logits, _ = model(tokens[:, :-1], reset=reset)
            total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            losses.append(total.item())
    return torch.tensor(losses)


def check_loss_curve(family, steps, length, calls):
    found, expected = (loss_curve(family, backend, steps, length) for backend in ("nki", "torch"))
    assert (found - expected).abs().max() < 1e-3
    assert expected[-1] < expected[0] - 0.1  # it learns, so that there is a curve
    of_a_layer = 1 if family == "gla" else 2  # the others have a convolution
    assert len(calls) == 2 * 2 * of_a_layer * steps  # layers, directions


@pytest.mark.parametrize("family", ["mamba", "gated_deltanet"])
def test_a_model_trains_as_it_does_by_torch(family, calls):
    check_loss_curve(family, 5, 20, calls)


@pytest.mark.kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_loss_curve_of_torch(family, calls):
    check_loss_curve(family, 20, 150, calls)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_padded_prompt_and_generation_by_kernels(family, calls):
    model = tiny_model(family)
    tokens = torch.randint(30, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12).expand(2, -1) >= torch.tensor([[7], [0]])
    logits = {}
    for backend in ("nki", "torch"):
        with ops.use_backend(backend):
            prompt, state = model(tokens, mask=mask)
            logits[backend] = torch.cat([prompt * mask[..., None], model(tokens[:, :1], state)[0]], 1)
    assert error(*logits.values()) < 1e-5
    assert calls
