"""The language model as a whole: mixtures, states, initial weights, saving and loading."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.matching import match_parameters
from ssm_trn.state import map_state

from .mixers.cases import CASES

MIXTURE = [
    {"mixer": "gated_deltanet", "n_heads": 2},
    {"mixer": "mamba2", "d_state": 8, "head_dim": 16, "feed_forward": "none"},
    {"mixer": "attention", "n_heads": 2, "window": 5},
    {"mixer": "mamba", "d_state": 4},
]


def config(**changes):
    return ModelConfig(**{"vocab_size": 50, "d_model": 32, "layers": MIXTURE, **changes})


def model_of(**changes):
    torch.manual_seed(0)
    return LanguageModel(config(**changes)).double()


def tokens_of(batch, length, vocab_size=50):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def test_prefill_in_chunks_then_steps_equals_one_pass():
    model, tokens = model_of(), tokens_of(2, 40)
    expected, _ = model(tokens)
    assert expected.shape == (2, 40, 50)
    state, outs = model.init_state(2, 40), []
    for first, last in ((0, 17), (17, 33), *((t, t + 1) for t in range(33, 40))):
        logits, state = model(tokens[:, first:last], state)
        outs.append(logits)
    assert_close(torch.cat(outs, 1), expected)


def test_prompts_of_different_lengths_in_one_batch():
    model, tokens = model_of(), tokens_of(2, 12)
    mask = torch.arange(12).expand(2, -1) >= torch.tensor([[7], [0]])  # the first is padded on the left
    logits, state = model(tokens, mask=mask)
    alone, alone_state = model(tokens[:1, 7:])
    assert_close(logits[0, 7:], alone[0])
    following = tokens_of(2, 1)
    assert_close(model(following, state)[0][0], model(following[:1], alone_state)[0][0])


def test_documents_in_one_row_do_not_see_each_other():
    model, tokens = model_of(), tokens_of(1, 30)
    reset = torch.zeros(1, 30, dtype=torch.bool)
    reset[0, [0, 11, 12]] = True
    packed, _ = model(tokens, reset=reset)
    assert_close(packed, torch.cat([model(part)[0] for part in tokens.split([11, 1, 18], 1)], 1))


def test_scaled_embeddings_and_capped_logits():
    tokens = tokens_of(2, 20)
    plain = model_of(tie_embeddings=False)
    changed = model_of(tie_embeddings=False, embedding_scale=32**0.5, logit_soft_cap=0.05)
    with torch.no_grad():
        plain.embedding.weight *= 32**0.5
    logits, expected = changed(tokens)[0], plain(tokens)[0]
    assert expected.abs().max() > 0.1
    assert_close(logits, 0.05 * torch.tanh(expected / 0.05))


def test_norms_of_outputs_and_the_feed_forward_layers():
    layer = {"mixer": "attention", "n_heads": 2, "feed_forward": "geglu", "norm_output": True}
    model, tokens = model_of(layers=[layer], feed_forward_bias=True), tokens_of(2, 9)
    (block,) = model.blocks
    torch.nn.init.normal_(block.feed_forward.gate_and_up.bias)
    torch.nn.init.normal_(block.feed_forward.out_proj.bias)
    x = model.embedding(tokens)
    x = x + block.mixer_norm(block.mixer(x)[0])
    gate, up = block.feed_forward.gate_and_up(x).chunk(2, -1)
    gate = gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2
    x = x + block.feed_forward_norm(block.feed_forward.out_proj(gate * up))
    assert_close(model(tokens)[0], model.logits(model.norm(x)))
    assert ModelConfig.from_dict(model.config.to_dict()) == model.config
    assert "norm_output" not in config().to_dict()["layers"][0]


def test_checkpointed_activations_change_no_gradient():
    model, tokens = model_of(), tokens_of(2, 20)
    gradients = []
    for model.checkpoint_activations in (False, True):
        loss = model(tokens)[0].logsumexp(-1).sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_model_compiles_without_a_graph_break():
    model, tokens = model_of(), tokens_of(2, 70)
    reset = torch.zeros(2, 70, dtype=torch.bool)
    reset[:, 30] = True
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, state = compiled(tokens, reset=reset)
    expected, expected_state = model(tokens, reset=reset)
    assert_close(logits, expected)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(logits.logsumexp(-1).sum(), weights)
    assert_close(gradients, torch.autograd.grad(expected.logsumexp(-1).sum(), weights))
    assert_close(compiled(tokens[:, :1], state)[0], model(tokens[:, :1], expected_state)[0])


def test_a_new_model_predicts_almost_uniformly():
    model, tokens = model_of(), tokens_of(4, 64)
    loss = torch.nn.functional.cross_entropy(model(tokens)[0][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(50)) < 0.1


def test_initial_weights_follow_the_papers_and_drawing_twice_changes_only_the_draw():
    torch.manual_seed(0)
    model = LanguageModel(
        config(d_model=256, layers=["mamba", "mamba2", {"mixer": "gated_deltanet", "n_heads": 64}] * 2)
    )
    for _ in range(2):
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            if name.endswith("dt_bias"):
                dt = torch.nn.functional.softplus(weight)
                assert dt.min() >= 1e-3 * 0.999 and dt.max() <= 1e-1 * 1.001
                if weight.numel() >= 256:  # log-uniform: its mean is the middle of the logarithms
                    assert abs(dt.log10().mean().item() + 2) < 0.1
            if name.endswith("A_log") and weight.dim() == 1:
                assert weight.exp().min() >= 1 and weight.exp().max() <= 16
            if name.endswith("feed_forward.out_proj.weight"):
                assert abs(weight.std().item() - 0.02 / math.sqrt(12)) < 5e-4
        assert torch.equal(weights["blocks.0.mixer.A_log"][3].exp().round(), torch.arange(1.0, 17.0))
        assert abs(weights["embedding.weight"].std().item() - 0.02) < 1e-3
        before = weights["embedding.weight"].clone()
        model.reset_parameters()
        assert not torch.equal(before, model.embedding.weight)


def test_a_model_made_without_memory_gets_the_same_initial_weights():
    torch.manual_seed(0)
    expected = LanguageModel(config()).state_dict()
    model = LanguageModel.without_memory(config()).to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    torch.manual_seed(0)
    again = LanguageModel(config())
    torch.manual_seed(0)
    again.reset_parameters()
    assert model.state_dict().keys() == expected.keys()
    for name, value in again.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_extra_rows_of_the_embedding_never_get_a_logit():
    model = model_of(vocab_multiple=64)
    assert model.embedding.weight.shape[0] == 64
    assert model(tokens_of(1, 5))[0].shape == (1, 5, 50)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_weights_that_no_model_has_are_refused(tmp_path, dtype):
    model_of().float().save_pretrained(tmp_path)
    weights = {name: value.clone() for name, value in load_file(tmp_path / "model.safetensors").items()}
    weights["embedding.weight"] = weights["embedding.weight"].to(dtype)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"are in .*{dtype}.*: it must be one kind of 16, 32 or 64 bits"):
        LanguageModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_saved_and_loaded_models_are_equal(tmp_path, tie_embeddings):
    model = model_of(tie_embeddings=tie_embeddings).float()
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["format_version"] == 1
    loaded = LanguageModel.from_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens_of(1, 9))[0], model(tokens_of(1, 9))[0])
    assert all(not parameter.is_meta for parameter in loaded.parameters())


def test_what_is_wrong_with_a_folder_is_said_in_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no model"):
        LanguageModel.from_pretrained(tmp_path)
    model_of().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for content in (b"[]", b"\xff", b"{", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match="config.json (describes no model|is not JSON)"):
            LanguageModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**saved, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        LanguageModel.from_pretrained(tmp_path)
    for width, message in ((64, "do not fit"), (10**18, "cannot be made"), (10**30, "cannot be made")):
        saved["model"]["d_ff"] = width
        (tmp_path / "config.json").write_text(json.dumps(saved))
        with pytest.raises(ValueError, match=message) as raised:
            LanguageModel.from_pretrained(tmp_path)
        assert "\n" not in str(raised.value)
    del saved["model"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="no model"):
        LanguageModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12")
    saved["model"] = config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="not a safetensors file"):
        LanguageModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ["mambo"]}, "unknown mixer 'mambo': choose one of attention"),
        ({"layers": []}, "at least one mixer"),
        ({"layers": [{"n_heads": 2}]}, "names no mixer"),
        ({"layers": [{"mixer": "mamba2", "heads": 2}]}, "no option 'heads': it takes d_state"),
        ({"layers": [{"mixer": "mamba2", "feed_forward": "gelu"}]}, "none of swiglu, geglu, none"),
        ({"d_model": 0}, "d_model is 0"),
        ({"d_model": 770, "layers": [{"mixer": "attention", "n_heads": 12}]}, "770 is not divisible by n_heads 12"),
        ({"layers": [{"mixer": "gated_deltanet", "n_heads": 5}]}, "32 is not divisible by n_heads 5"),
        ({"layers": [{"mixer": "mamba2", "head_dim": 48}]}, "not divisible by head_dim 48"),
        ({"layers": [{"mixer": "attention", "n_heads": 4, "n_kv_heads": 3}]}, "not a multiple"),
    ],
)
def test_a_wrong_config_is_told_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        LanguageModel.without_memory(config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": "32"}, "the model config: d_model is '32', which should be of type int"),
        ({"d_ff": 64.0}, "d_ff is 64.0, which should be of type int or null"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"tie_embeddings": "no"}, "tie_embeddings is 'no', which should be of type bool"),
        ({"norm_eps": math.nan}, "norm_eps is nan"),
        ({"norm_eps": -1}, "norm_eps is -1; it must be at least 0"),
        ({"logit_soft_cap": 0}, "logit_soft_cap is 0; it must be above 0"),
        ({"embedding_scale": -1.0}, "embedding_scale is -1.0; it must be above 0"),
        ({"layers": [{"mixer": "mamba2", "norm_output": 1}]}, "norm_output is 1, which should be of type bool"),
        ({"layers": "mamba2"}, "must be a list"),
        ({"layers": {"mixer": "mamba2"}}, "must be a list"),
        ({"layers": [3]}, "layer 3 is neither a mixer's name nor a mapping"),
        ({"layers": [{"mixer": ["mamba2"]}]}, "mixer is \\['mamba2'\\], which should be of type str"),
        ({"layers": [{"mixer": "mamba2", "d_state": "8"}]}, "mixer 'mamba2': d_state is '8'"),
        ({"layers": [{"mixer": "attention", "window": 2.5}]}, "window is 2.5, which should be of type int or null"),
        ({"layers": [{"mixer": "attention", "qk_norm": "no"}]}, "qk_norm is 'no', which should be of type bool"),
        ({"layers": [{"mixer": "mamba2", "expand": 0.01}]}, "expand 0.01 leaves nothing of d_model 32"),
        ({"layers": [{"mixer": "mamba", "expand": 0.01}]}, "expand 0.01 leaves nothing of d_model 32"),
    ],
)
def test_values_of_another_type_are_told_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        LanguageModel.without_memory(config(**changes))


def test_a_whole_number_stands_for_a_float():
    assert config(norm_eps=0, layers=[{"mixer": "mamba2", "expand": 2, "head_dim": 8}]).norm_eps == 0


def test_wrong_inputs_are_told_in_one_sentence():
    model, tokens = model_of(), tokens_of(2, 9)
    for wrong in (tokens[0], tokens[:, :0], tokens[:0], tokens.double()):
        with pytest.raises(ValueError, match=r"tokens must be int64 \[batch, time\], at least one of each"):
            model(wrong)
    for wrong in (torch.ones(2, 9), torch.ones(2, 8, dtype=torch.bool), torch.ones(9, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask must be bool \[2, 9\]"):
            model(tokens, mask=wrong)
        with pytest.raises(ValueError, match=r"reset must be bool \[2, 9\]"):
            model(tokens, reset=wrong)
    for batch in (1, 3):
        with pytest.raises(ValueError, match=f"the state is one of {batch} sequences, the tokens are of 2"):
            model(tokens, model.init_state(batch, 9))


def test_config_survives_json():
    original = config()
    assert ModelConfig.from_dict(json.loads(json.dumps(original.to_dict()))) == original
    with pytest.raises(ValueError, match="no 'width'"):
        ModelConfig.from_dict({"width": 3})
    with pytest.raises(ValueError, match="lacks d_model, layers"):
        ModelConfig.from_dict({"vocab_size": 3})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("feed_forward", "target"), [("swiglu", 900_000), ("none", 450_000)])
def test_models_are_matched_in_parameters(case, feed_forward, target):
    start = ModelConfig(1000, 128, [{**CASES[case], "feed_forward": feed_forward}] * 3)
    try:
        matched = match_parameters(start, target)
    except ValueError as error:
        # without a feed-forward layer the only widths are those that divide into heads
        assert feed_forward == "none" and "change the number of layers" in str(error)
        return
    assert abs(matched.parameter_count() / target - 1) <= 0.01
    assert matched.parameter_count() == LanguageModel(matched).parameter_count()


def test_an_unreachable_size_names_the_nearest():
    with pytest.raises(ValueError, match="the nearest, d_model"):
        match_parameters(ModelConfig(4096, 64, ["attention"]), 10_000)


def test_state_helpers():
    state = model_of().init_state(3, 10, dtype=torch.float32)
    first = map_state(lambda part: part[:1], state)
    assert [[part.shape for part in layer] for layer in first] == [
        [(1, *part.shape[1:]) for part in layer] for layer in state
    ]
