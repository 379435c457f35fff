"""Models of transformers with random weights are the same models in ssm_trn, and go back."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssm_trn import LanguageModel, ModelConfig, interop
from ssm_trn.generation import generate
from ssm_trn.interop.formats import FORMATS

from .models import CASES, VOCABULARY, logits_of, theirs_of

TOLERANCE = 1e-5
# transformers takes 1 - a^2 of RG-LRU by subtraction, which costs digits where a is near 1: our model in float64 is as
# near to ours in float32 as 1e-6, and to theirs as 1e-4.
TOLERANCES = {"recurrent_gemma": 1e-4}
TOKENS = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
ONE_OF_EACH = {format: case for case, (format, _, _) in reversed(CASES.items())}


@pytest.fixture(scope="module")
def saved(transformers, tmp_path_factory):
    """A function: the model of a case and the folder that transformers wrote it to."""
    made = {}

    def get(case):
        if case not in made:
            theirs, folder = theirs_of(transformers, case), tmp_path_factory.mktemp("theirs")
            theirs.save_pretrained(folder)
            made[case] = theirs, folder
        return made[case]

    return get


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_every_format_of_transformers_is_tested():
    assert set(ONE_OF_EACH) == {name for name, form in FORMATS.items() if form.architecture}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_logits_are_the_same(saved, case):
    theirs, folder = saved(case)
    tokens = torch.randint(VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(2))
    expected, _ = logits_of(theirs, tokens)
    logits, _ = interop.load(folder)(tokens)
    assert expected.argmax(-1).unique().numel() > 10  # tokens of all kinds, so all weights matter
    assert error(logits, expected) < TOLERANCES.get(case, TOLERANCE)


@pytest.mark.parametrize("case", ONE_OF_EACH.values())
@torch.no_grad()
def test_greedy_generation_is_the_same(saved, case):
    theirs, folder = saved(case)
    expected = greedy(theirs, 64)
    assert len({*expected[0]}) > 3
    assert generate(interop.load(folder), TOKENS.tolist(), 64) == expected


def greedy(theirs, count):
    """The likeliest next tokens, by transformers' `generate`, which cannot run Kimi Linear without full attention."""
    if "Kimi" not in type(theirs).__name__:
        mask = torch.ones_like(TOKENS)
        text = theirs.generate(TOKENS, attention_mask=mask, max_new_tokens=count, do_sample=False)
        return text[:, TOKENS.shape[1] :].tolist()
    tokens, cache, text = TOKENS, None, TOKENS
    for _ in range(count):
        logits, cache = logits_of(theirs, tokens, cache, text.shape[1] - tokens.shape[1])
        tokens = logits[:, -1:].argmax(-1)
        text = torch.cat([text, tokens], 1)
    return text[:, TOKENS.shape[1] :].tolist()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_saving_gives_the_weights_and_options_back(saved, case, tmp_path):
    theirs, folder = saved(case)
    ours = interop.load(folder)
    interop.save(ours, tmp_path, CASES[case][0])
    again = type(theirs).from_pretrained(tmp_path)
    weights = dict(again.state_dict())
    assert weights.keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        if stored_less_one(theirs, name):
            assert torch.equal(weights[name], (value + 1) - 1)
        else:
            assert torch.equal(weights[name], value)
    original, written = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path))
    assert {name: original.get(name, value) for name, value in written.items()} == written | same_in_effect(written)
    assert torch.equal(interop.load(tmp_path)(TOKENS)[0], ours(TOKENS)[0])


def stored_less_one(theirs, name):
    """Norms of Gemma and Qwen3-Next: ours hold 1 + weight, which in float32 costs the digits below 2^-24."""
    norm = name.endswith("norm.weight") and "linear_attn" not in name
    return norm and type(theirs).__name__ in ("RecurrentGemmaForCausalLM", "Qwen3NextForCausalLM")


def same_in_effect(written):
    """The other way to write a model without experts, and the layers of RecurrentGemma told one by one."""
    if written["model_type"] == "qwen3_next":
        return {"num_experts": pytest.approx(2, abs=2)}
    if written["model_type"] == "recurrent_gemma":
        return {"block_types": ["recurrent", "recurrent", "attention"]}
    return {}


@pytest.mark.parametrize("case", ONE_OF_EACH.values())
@torch.no_grad()
def test_bfloat16_goes_and_comes_back_bit_by_bit(transformers, case, tmp_path):
    theirs = theirs_of(transformers, case).bfloat16()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = interop.load(tmp_path / "theirs")
    assert ours.embedding.weight.dtype == ours.blocks[0].mixer.in_proj.weight.dtype == torch.bfloat16
    assert ours.blocks[0].mixer_norm.weight.dtype == torch.float32
    assert ours(TOKENS)[0].isfinite().all()
    interop.save(ours, tmp_path / "again", CASES[case][0])
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert again.dtype == torch.bfloat16
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name].to(value.dtype), value)


@pytest.mark.parametrize("case", ONE_OF_EACH.values())
def test_missing_left_over_and_misshapen_weights_are_listed(saved, case, tmp_path):
    _, folder = saved(case)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    missing = next(name for name in weights if "layers.0" in name and name.endswith("norm.weight"))
    misshapen = next(name for name in weights if "layers.1" in name and "out" in name or "down_proj" in name)
    weights |= {misshapen: weights[misshapen][:-1].clone()}
    weights |= {f"model.layers.{i}.mlp.experts.weight": torch.zeros(2) for i in range(3)} | {"extra": torch.zeros(1)}
    missing_value = weights.pop(missing)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as raised:
        interop.load(tmp_path)
    assert f"{tmp_path} do not fit its config.json" in str(raised.value)
    told = str(raised.value).split(": ", 1)[1].split("; ")
    for problem, part in (("missing are", missing_value), ("left over are", None), ("of another shape are", None)):
        assert any(one.startswith(problem) for one in told), part
    assert "model.layers.*.mlp.experts.weight (3 times)" in str(raised.value) and "extra" in str(raised.value)


def test_weights_in_several_files_are_read(saved, tmp_path):
    theirs, folder = saved("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        assert torch.equal(interop.load(tmp_path)(TOKENS)[0], interop.load(folder)(TOKENS)[0])


def test_names_of_earlier_releases_are_read(saved, tmp_path):
    for case, changes in (
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("mamba", {"lm_head.weight": None}),  # the tied head once more
    ):
        _, folder = saved(case)
        shutil.copytree(folder, tmp_path / case)
        weights = load_file(folder / "model.safetensors")
        embedding = next(value for name, value in weights.items() if "embed" in name)
        weights |= {name: embedding.clone() if value is None else value for name, value in changes.items()}
        if case == "mamba":
            weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
        save_file(weights, tmp_path / case / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        if case == "llama":
            config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        (tmp_path / case / "config.json").write_text(json.dumps(config))
        with torch.no_grad():
            assert torch.equal(interop.load(tmp_path / case)(TOKENS)[0], interop.load(folder)(TOKENS)[0])


def test_a_head_that_only_seems_tied_is_told(saved, tmp_path):
    _, folder = saved("mamba")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros(VOCABULARY, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="head and embedding are one, and the weights have lm_head.weight of its own"):
        interop.load(tmp_path)


BARE = {"feed_forward": "none"}
MAMBA, MAMBA2 = {"mixer": "mamba", **BARE}, {"mixer": "mamba2", "head_dim": 8, **BARE}
SMALL = {"n_heads": 2, "head_dim": 8}
RG_LRU = {"mixer": "rg_lru", "feed_forward": "geglu", "n_heads": 2}
INEXPRESSIBLE = [
    ("mamba", ["mamba2"], {}, "has no layer like layer 0: mixer mamba2, feed_forward swiglu"),
    ("mamba", ["mamba"], {}, "no layer like layer 0: mixer mamba, feed_forward swiglu"),
    (
        "mamba2",
        [{**MAMBA2, "negative_eigenvalues": True}],
        {},
        "negative",
    ),
    (
        "mamba2",
        [{**MAMBA2, "norm_before_gate": True}],
        {},
        "norm_before",
    ),
    (
        "mamba2",
        [{**MAMBA2, "norm_eps": 1e-3}],
        {},
        "layer_norm_epsilon",
    ),
    ("mamba", [{**MAMBA, "expand": 1.5}], {}, "expand in whole numbers, not 1.5"),
    ("falcon_mamba", [MAMBA], {}, "cannot express bcdt_norm_eps None of layer 0"),
    ("mamba", [{**MAMBA, "bcdt_norm_eps": 1e-6}], {}, "cannot express bcdt_norm_eps"),
    ("llama", ["attention"], {"logit_soft_cap": 3.0}, "cannot express logit_soft_cap 3.0 of the model"),
    ("llama", ["attention"], {"embedding_scale": 3.0}, "cannot express embedding_scale 3.0 of the model"),
    ("llama", [{"mixer": "attention", "rope_theta": None}], {}, "cannot express rope_theta None of layer 0"),
    ("llama", [{"mixer": "attention", "window": 4}], {}, "cannot express window 4 of layer 0"),
    ("llama", [{"mixer": "attention", "qkv_bias": True}], {}, "has one attention_bias for the whole model"),
    ("llama", ["attention", {"mixer": "attention", "n_heads": 2}], {}, "has one num_attention_heads for the whole"),
    ("qwen3_next", ["attention"], {}, "cannot express qk_norm False of layer 0"),
    ("olmo_hybrid", ["gated_deltanet"], {}, "both gated_deltanet and attention"),
    ("kimi_linear", [{"mixer": "kda", **SMALL, "n_key_heads": 1}], {}, "has key_heads 2 where this model has 1"),
    ("recurrent_gemma", [RG_LRU], {"logit_soft_cap": 30.0}, "cannot express feed_forward_bias False"),
    ("recurrent_gemma", [RG_LRU], {}, "cannot express logit_soft_cap None of the model"),
    ("state_spaces_mamba", [MAMBA], {"norm_eps": 1e-6}, "cannot express norm_eps"),
]


@pytest.mark.parametrize(("format", "layers", "options", "message"), INEXPRESSIBLE)
def test_what_a_format_has_no_word_for_is_told_and_nothing_is_written(format, layers, options, message, tmp_path):
    model = LanguageModel(ModelConfig(VOCABULARY, 32, layers, **options))
    with pytest.raises(ValueError, match=message):
        interop.save(model, tmp_path / "new", format)
    assert not (tmp_path / "new").exists()


@torch.no_grad()
def test_the_padding_of_a_vocabulary_stays_at_home(transformers, tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(VOCABULARY - 3, 32, [MAMBA], vocab_multiple=16)
    model = LanguageModel(config)
    interop.save(model, tmp_path, "mamba")
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path).eval()
    tokens = TOKENS.clamp(max=VOCABULARY - 4)
    assert error(model(tokens)[0], logits_of(theirs, tokens)[0]) < TOLERANCE
    assert interop.load(tmp_path).config == replace(
        config, vocab_multiple=1, layers=interop.load(tmp_path).config.layers
    )


def test_unknown_formats_are_told_what_there_is(tmp_path):
    model = LanguageModel(ModelConfig(8, 8, [MAMBA]))
    with pytest.raises(ValueError, match="unknown format 'mambo': choose one of ssm_trn, mamba, mamba2"):
        interop.save(model, tmp_path, "mambo")
    interop.save(model, tmp_path)
    with torch.no_grad():
        tokens = torch.tensor([[1, 2, 3]])
        assert torch.equal(interop.load(tmp_path)(tokens)[0], model(tokens)[0])
