"""Kinds of faults that users of other projects reported, by their numbers in the collection of cases.

Most kinds are properties in the suites that mirror the code; what those do not show at the sizes of a case is tested
here. Names without a file are those of tests below, the others are beside this file.

    case  kind                                       test
      1   gate of 1 equals no gate                   ops/test_equalities.py::test_log_decay_0_is_no_decay,
                                                     ::test_linear_attention_without_decay_is_masked_attention_...
      2   split invariance                           test_segments_equal_one_pass_at_the_size_of_a_real_layer;
                                                     ops/, mixers/test_properties.py::test_any_split_equals_one_pass
      3   step equals full                           test_step_by_step_equals_full_at_chunk_borders;
                                                     mixers/test_witnesses.py (order of gate and norm, one softplus)
      4   left padding                               test_left_padded_prompts_equal_unpadded_runs
      7   padding inside                             test_padding_inside_leaves_outputs_and_state_alone
      9   the future does not reach the past         test_a_loss_on_the_past_has_no_gradient_from_the_future;
                                                     ops/test_properties.py::test_the_past_is_bitwise_the_same_...,
                                                     ::test_more_steps_do_not_change_the_first
     10   very strong decays                         ops/test_properties.py::test_strong_decay_at_every_step_...,
                                                     ::test_one_strong_decay_erases_what_came_before
     13   keys that are not normalised               test_a_large_triangular_inverse_is_the_true_one;
                                                     ops/test_delta_rule.py::test_the_inverse_of_a_chunk_of_unit_...,
                                                     ::test_keys_that_are_not_of_length_1_are_computed_as_they_are
     14   odd sizes                                  ops/test_properties.py::test_odd_sizes_inside_poisoned_buffers
     15   input shorter than the filter              ops/test_short_conv.py::test_equals_conv1d_also_where_the_...
     16   every combination of None                  ops/test_properties.py::test_gradcheck
     18   packed documents                           test_the_state_after_each_packed_document_is_its_own;
                                                     ops/test_properties.py::test_resets_equal_separate_runs;
                                                     ops/test_packing.py (wrong and empty offsets)
     20   torch.compile                              test_ragged_documents_train_in_one_compiled_graph;
                                                     test_model.py::test_a_model_compiles_without_a_graph_break;
                                                     ops/test_properties.py::test_compiles_without_a_graph_break
     21   no kernel library                          test_models_need_no_library_but_torch;
                                                     ops/test_properties.py::test_the_backend_is_chosen_by_name
     22   statistics of initial weights              test_initial_gates_have_their_distribution_however_they_are_drawn;
                                                     test_model.py::test_initial_weights_follow_the_papers_...
     23   weight decay                               test_the_exact_parameters_of_the_other_mixers_without_weight_decay;
                                                     training/test_parameter_groups.py
     25   scores do not depend on the batch          test_copies_of_a_request_and_long_neighbours_do_not_change_its_...;
                                                     evaluation/test_lm.py::test_loglikelihood_..., ::test_rolling_...;
                                                     evaluation/test_evaluate.py::test_batch_size_changes_nothing
     27   resume through the command line            training/test_fit.py::test_a_killed_run_goes_on_...,
                                                     ::test_the_config_of_a_run_serves_validate_and_test;
                                                     data/test_datamodule.py::test_resume_goes_on_with_the_next_batch
     29   number of compiled graphs                  test_ragged_documents_train_in_one_compiled_graph,
                                                     test_decoding_takes_one_compiled_graph

    reported                                         test
    views that keep a long history alive             test_the_cache_of_a_window_keeps_no_more_than_the_window_alive;
                                                     ops/test_short_conv.py::test_the_tail_does_not_keep_the_...
    gradients in bfloat16 off by orders              test_gradients_in_bfloat16_are_summed_in_float32
    the end of long inputs dropped                   test_nothing_is_dropped_beyond_65536_... (steps, sequences)
    weights made in bfloat16                         test_a_model_made_in_bfloat16_keeps_its_gates_in_float32
"""

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from ssm_trn import LanguageModel, ModelConfig, mixers, ops
from ssm_trn.data.tokenizer import EOS_ID, Tokenizer
from ssm_trn.evaluation.lm import HarnessModel
from ssm_trn.layers import Float32Parameters
from ssm_trn.training import parameter_groups
from tests.evaluation.models import tiny_model
from tests.mixers.cases import CASES as MIXERS
from tests.mixers.cases import activations, make
from tests.mixers.test_properties import in_pieces
from tests.ops.cases import CASES as OPS
from tests.ops.cases import Sizes
from tests.ops.test_properties import assert_same_state, each, error, run_with_gradients, wide

VOCABULARY = 50

every_mixer = pytest.mark.parametrize("case", MIXERS)
every_op = pytest.mark.parametrize("case", OPS, ids=lambda case: case.name)


def random(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def model_of(*layers, factor: float = 5.0, **options) -> LanguageModel:
    """A small model; `factor` makes its matrices so large that every path through it matters."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(VOCABULARY, layers=layers, **{"d_model": 32, **options}))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.mul_(factor)
    return model


def seen_by_others(state) -> list[torch.Tensor]:
    """The state without the slots of a cache that hold no token."""
    if any(part.dtype == torch.int64 for part in state):  # keys, values, positions
        return [part[state[2] >= 0] for part in state]
    return list(state)


@pytest.mark.parametrize("name", mixers.names())
@torch.no_grad()
def test_segments_equal_one_pass_at_the_size_of_a_real_layer(name):
    options = {"d_state": 64} if name.startswith("mamba") else {}
    mixer = model_of({"mixer": name, "feed_forward": "none", **options}, factor=1, d_model=512).blocks[0].mixer
    x, following = random(1, 256, 512), random(1, 3, 512, seed=1)
    expected, state = mixer(x)
    expected_following, _ = mixer(following, state)
    cuts = torch.randperm(255, generator=torch.Generator().manual_seed(2))[:6].sort().values + 1
    for bounds in (*([*range(0, 256, size), 256] for size in (64, 1, 3, 63, 65)), [0, *cuts.tolist(), 256]):
        y, final = in_pieces(mixer, x, bounds)
        assert error(y, expected) < 1e-5
        assert error(mixer(following, final)[0], expected_following) < 1e-5
        if name != "attention":  # a cache may keep the same tokens in other slots
            assert all(error(one, two) < 1e-5 for one, two in zip(final, state, strict=True))


@every_mixer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_step_by_step_equals_full_at_chunk_borders(case, dtype):
    lengths = 29, 30, 31, 65, 129  # two chunks and a step: chunks are of 32 or of 64
    mixer, x = make(case, torch.float32).to(dtype), activations(2, 129, dtype=dtype)
    steps, _ = in_pieces(mixer, x, range(130), mixer.init_state(2, 129, "cpu", dtype))
    for length in lengths:
        full, _ = mixer(x[:, :length])
        if dtype == torch.float32:
            assert_close(steps[:, :length], full, atol=1e-5, rtol=0)
        else:
            assert error(steps[:, :length], full) < 1e-2


@every_mixer
@torch.no_grad()
def test_left_padded_prompts_equal_unpadded_runs(case):
    """Together and, as a batch of one must not be a case of its own, alone; then on beyond the window."""
    model = model_of(MIXERS[case], MIXERS[case])
    assert model.embedding.weight[EOS_ID].norm() > 0.1  # a padding token that would be seen
    prompts, following = [random_tokens(2), random_tokens(6, seed=1)], random_tokens(2, 8, seed=2)
    tokens, mask = torch.full((2, 6), EOS_ID), torch.zeros(2, 6, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, True

    def last_logits(tokens, mask, following):
        logits, state = model(tokens, model.init_state(len(tokens), 14), mask)
        rows = [logits[:, -1]]
        for token in following.split(1, 1):
            logits, state = model(token, state)
            rows.append(logits[:, -1])
        return torch.stack(rows, 1)

    expected = [last_logits(p[None], None, following[[row]]) for row, p in enumerate(prompts)]
    assert expected[0].std() > 0.1
    assert_close(last_logits(tokens, mask, following), torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert_close(last_logits(tokens[:1], mask[:1], following[:1]), expected[0], atol=1e-5, rtol=1e-5)


@every_mixer
@torch.no_grad()
def test_padding_inside_leaves_outputs_and_state_alone(case):
    mixer, x = make(case, torch.float32), activations(1, 8, dtype=torch.float32)
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[:, 3:6] = False
    outcomes = []
    for content in (x[:, 3:6], 1e4 * activations(1, 3, seed=7, dtype=torch.float32), torch.tensor(torch.nan)):
        filled = x.clone()
        filled[:, 3:6] = content
        y, state = mixer(filled, None, mask)
        outcomes.append([y[:, :3], y[:, 6:], *seen_by_others(state)])
        before = mixer(filled[:, :3])[1]
        after = mixer(filled[:, 3:6], before, mask[:, 3:6])[1]
        for one, two in zip(seen_by_others(before), seen_by_others(after), strict=True):
            assert torch.equal(one, two)
    for outcome in outcomes[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outcome, outcomes[0], strict=True))


@every_mixer
def test_a_loss_on_the_past_has_no_gradient_from_the_future(case):
    mixer, last = make(case, torch.float32), 40
    gradients = []
    for seed in (1, 2):  # another future
        x = activations(1, 70, dtype=torch.float32)
        x[:, last:] = 5 * activations(1, 70 - last, seed=seed + 10, dtype=torch.float32)
        x.requires_grad_()
        past = mixer(x)[0][:, :last]
        gradients += torch.autograd.grad((past * activations(1, last, seed=5, dtype=torch.float32)).sum(), x)
    assert torch.equal(gradients[0][:, :last], gradients[1][:, :last])
    assert not any(gradient[:, last:].any() for gradient in gradients)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_triangular_inverse_is_the_true_one(seed, dtype):
    """The state after erasing along random b_t, and writing at unit vectors, is the inverse of I + the b_ts for s < t.

    It is of order 1e7 or 1e8: nothing is cut off to make it look better.
    """
    below = random(64, 64, seed=seed, dtype=torch.float64).tril(-1)
    identity = torch.eye(64, dtype=torch.float64)
    inverse = torch.linalg.solve_triangular(identity + below, identity, upper=False, unitriangular=True)
    assert 1e7 < inverse.abs().max() < 1e10
    a, b = (x[None, :, None].to(dtype) for x in (identity, below))  # [1, T, 1, K]
    for chunk_size in (None, 64):
        _, state = ops.delta_rule(a, a, a, None, erase=(a, b), chunk_size=chunk_size)
        assert error(state[0, 0], inverse) < (1e-5 if dtype == torch.float32 else 1e-12)


@every_op
def test_the_state_after_each_packed_document_is_its_own(case):
    lengths = torch.tensor([1, 63, 64, 65, 130])
    offsets = [0, *lengths.cumsum(0).tolist()]
    inputs, reset = case.inputs(offsets[-1], sizes=Sizes(batch=1)), ops.resets_from(torch.tensor(offsets))
    for start, stop in pairwise(offsets):
        _, final = case(case.during(inputs, 0, stop), reset=reset[:, :stop])
        assert_same_state(case, final, case(case.during(inputs, start, stop))[1], 1e-10)


WITHOUT_LIBRARIES = """
import sys, warnings
absent = "fla mamba_ssm causal_conv1d mambapy ssm_nki transformers lightning lm_eval datasets sentencepiece"
sys.modules.update(dict.fromkeys(absent.split()))  # None: an import of it fails
import torch
from ssm_trn import LanguageModel, ModelConfig, mixers
warnings.simplefilter("error")
model = LanguageModel(ModelConfig(50, 64, mixers.names()))
logits, state = model(torch.arange(9)[None])
logits.sum().backward()
print(*model(torch.tensor([[3]]), state)[0].shape)
"""


def test_models_need_no_library_but_torch():
    shown = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES], capture_output=True, text=True)
    assert shown.stdout.split() == ["1", "1", "50"], shown.stderr


def distance_from_uniform(x: torch.Tensor) -> float:
    """Kolmogorov's distance between a sample and the uniform distribution on [0, 1], times the root of its size."""
    x = x.flatten().double().sort().values
    between = (torch.arange(len(x)) + 0.5) / len(x)
    return (x - between).abs().max().item() * len(x) ** 0.5


def test_initial_gates_have_their_distribution_however_they_are_drawn():
    layers = ["mamba", {"mixer": "mamba2", "head_dim": 2}]
    layers += [{"mixer": name, "n_heads": 64, "head_dim": 4} for name in ("gated_deltanet", "kda")]
    config = ModelConfig(VOCABULARY, 128, layers)

    def reset(module):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    torch.manual_seed(0)
    applied_twice = LanguageModel(config).apply(reset).apply(reset)
    from_meta = LanguageModel.without_memory(config).to_empty(device="cpu").apply(reset)
    draws = []
    for model in (LanguageModel(config), applied_twice, from_meta):
        weights = dict(model.named_parameters())
        for i in range(4):
            dt = F.softplus(weights[f"blocks.{i}.mixer.dt_bias"])
            assert dt.min() > 0.999e-3 and dt.max() < 1.001e-1
            assert distance_from_uniform((dt.log10() + 3) / 2) < 1.95  # exceeded once in a thousand draws
            A = weights[f"blocks.{i}.mixer.A_log"].exp()
            if i > 0:
                assert A.min() > 0.999 and A.max() < 16.001
                assert distance_from_uniform((A - 1) / 15) < 1.95
            else:
                assert_close(A, torch.arange(1.0, 17.0).expand(256, -1))
        assert abs(weights["blocks.0.mixer.in_proj.weight"].std().item() - 0.02) < 1e-3  # not Linear's own draw
        draws.append(weights["blocks.1.mixer.dt_bias"])
    assert not any(torch.equal(one, two) for one, two in pairwise(draws))


def test_the_exact_parameters_of_the_other_mixers_without_weight_decay():
    """Those that are not in tests/training/test_parameter_groups.py."""
    model = model_of(*({"mixer": name, "feed_forward": "none"} for name in ("retnet", "gla", "deltanet", "kda")))
    groups = parameter_groups(model, weight_decay=0.1)
    kept = [name for group in groups if group["weight_decay"] == 0 for name, _ in group["params"]]
    own = {0: ["norm.weight"], 1: ["gate_bias", "norm.weight"], 2: ["norm.weight"]}
    own[3] = ["A_log", "dt_bias", "norm.weight"]
    expected = ["embedding.weight", "norm.weight"]
    for i, names in own.items():
        expected += [f"blocks.{i}.mixer_norm.weight", *(f"blocks.{i}.mixer.{name}" for name in names)]
    assert sorted(kept) == sorted(expected)


def test_copies_of_a_request_and_long_neighbours_do_not_change_its_score():
    tokenizer = Tokenizer.train(["the free people of the nation must work for peace and the state of the law"], 290)
    request, long = ("the free", " people"), ("the nation must work for peace " * 4, " and the law of the people")
    for kind in ("recurrent", "hybrid", "transformer"):
        lm = HarnessModel(tiny_model(kind, 290), tokenizer, max_length=100)

        def score(*pairs, lm=lm):
            requests = [SimpleNamespace(args=pair) for pair in pairs]
            return [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]

        alone, long_alone = score(request) + score(long)
        assert score(*[request] * 5) == pytest.approx([alone] * 5, abs=1e-5)
        assert score(request, long, request) == pytest.approx([alone, long_alone, alone], abs=1e-5)


def without_feed_forward(*cases: str) -> list[dict]:
    return [MIXERS[case] | {"feed_forward": "none"} for case in cases]


def test_ragged_documents_train_in_one_compiled_graph():
    """The mixers that are not in the mixture of tests/test_model.py; fullgraph allows no break."""
    model = model_of(*without_feed_forward("retnet", "gla", "deltanet", "kda"))
    counter, weights = CompileCounterWithBackend("aot_eager"), list(model.parameters())

    def loss_of(tokens, targets, reset):
        logits, _ = model(tokens, reset=reset)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    for step in range(20):
        tokens = random_tokens(2, 71, seed=step)
        reset = torch.rand(2, 70, generator=torch.Generator().manual_seed(step)) < 0.01 * step
        batch = tokens[:, :-1], tokens[:, 1:].masked_fill(reset.roll(-1, 1), -100), reset
        gradients = torch.autograd.grad(compiled(*batch), weights)
        if step % 10 == 5:
            for one, two in zip(gradients, torch.autograd.grad(loss_of(*batch), weights), strict=True):
                assert error(one, two) < 1e-5
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    assert counter.frame_count == 1


@torch.no_grad()
def test_decoding_takes_one_compiled_graph():
    model, tokens = model_of(*without_feed_forward("mamba2", "attention", "attention-window")), random_tokens(2, 30)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    step = torch.compile(model, backend=counter)
    state, logits = model(tokens[:, :10], model.init_state(2, 30))[1], []
    for t in range(10, 30):
        new, state = step(tokens[:, t : t + 1], state)
        logits.append(new)
    assert counter.frame_count == 1
    assert_close(torch.cat(logits, 1), model(tokens)[0][:, 10:], atol=1e-5, rtol=1e-5)


def test_the_cache_of_a_window_keeps_no_more_than_the_window_alive():
    """Of one row too, where the end of the history is contiguous."""
    for batch in (1, 2):
        q = random(batch, 500, 2, 4)
        _, cache = ops.attention(q, q, q, window=9)
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in cache)


@every_op
def test_gradients_in_bfloat16_are_summed_in_float32(case):
    """Those of the initial state too, which a sum in bfloat16 over all steps had wrong by orders of magnitude."""
    inputs, state = case.inputs(130, torch.bfloat16), case.state(torch.bfloat16)
    _, gradients = run_with_gradients(case, inputs, state)
    with ops.use_backend("reference"):
        _, expected = run_with_gradients(case, each(wide, inputs), each(wide, state))
    for actual, gradient in zip(gradients, expected, strict=True):
        assert error(actual, gradient) < 1e-2


RECURRENT = "linear_attention-head", "delta_rule-head", "selective_scan", "short_conv"
LONG = [case for case in OPS if case.name in RECURRENT]
SHORT = [case for case in OPS if case.name in (*RECURRENT, "attention")]
TINY = {"heads": 1, "keys": 2, "values": 2}


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
@torch.no_grad()
def test_nothing_is_dropped_beyond_65536_steps(case):
    length = 2**16 + 70
    inputs = case.inputs(length, torch.float32, sizes=Sizes(batch=1, **TINY))
    out, final = case(inputs)
    _, state = case(case.during(inputs, 0, length - 100))
    expected, expected_final = case(case.during(inputs, length - 100, None), state)
    assert error(out[:, -100:], expected) < 1e-5
    assert_same_state(case, final, expected_final, 1e-5)


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
@torch.no_grad()
def test_nothing_is_dropped_beyond_65536_sequences(case):
    inputs = case.inputs(2, torch.float32, sizes=Sizes(batch=2**16 + 2, **TINY))
    last = {name: x if name in case.weights else x[-2:] for name, x in inputs.items()}
    assert error(case(inputs)[0][-2:], case(last)[0]) < 1e-6


def test_a_model_made_in_bfloat16_keeps_its_gates_in_float32():
    """Gates drawn in bfloat16 would have 3 digits; log-uniform ones would not be that any more."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LanguageModel(ModelConfig(VOCABULARY, 64, mixers.names()))
        logits, _ = model(random_tokens(1, 5))
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    for module in model.modules():
        wanted = torch.float32 if isinstance(module, Float32Parameters) else torch.bfloat16
        assert all(parameter.dtype == wanted for parameter in module.parameters(recurse=False))
    assert any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
