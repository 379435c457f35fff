"""Folders of ssm_trn through transformers' Auto classes and lm-eval's model for them."""

import json
import random
import subprocess
import sys

import pytest
import torch

from ssm_trn import LanguageModel, ModelConfig, mixers
from ssm_trn.evaluation.lm import HarnessModel
from ssm_trn.generation import generate
from ssm_trn.interop.tokenizer import export_tokenizer
from tests.evaluation.conftest import data, tokenizer  # noqa: F401  (fixtures)
from tests.evaluation.models import LAYERS, tiny_model
from tests.evaluation.requests import MAX_LENGTH, random_requests, text
from tests.evaluation.test_against_hf import instances
from tests.mixers.cases import CASES

VOCABULARY = 50
MIXTURES = LAYERS | {
    "mixed": [
        {"mixer": "rg_lru", "n_heads": 2, "feed_forward": "geglu"},
        {"mixer": "mamba", "d_state": 4, "feed_forward": "none"},
        {"mixer": "attention", "n_heads": 2, "window": 5},
        {"mixer": "attention", "n_heads": 2, "norm_output": True},
    ]
}


def model_of(layers, **options):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(VOCABULARY, 32, layers, tie_embeddings=False, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


@pytest.fixture(params=MIXTURES)
def pair(transformers, request, tmp_path):
    """Our model, and what transformers makes of its folder."""
    ours = model_of(MIXTURES[request.param])
    ours.save_pretrained(tmp_path)
    return ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def left_padded(rows):
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask


PROMPTS = [[7, 3, 9], [1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [2, 7, 1, 8, 2, 8]]


@torch.no_grad()
def test_logits_and_loss(pair):
    ours, theirs = pair
    tokens = torch.randint(VOCABULARY, (2, 17))
    logits, _ = ours(tokens)
    out = theirs(tokens, labels=tokens)
    assert torch.equal(out.logits, logits)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.allclose(out.loss, expected)
    assert torch.equal(theirs(tokens, logits_to_keep=3).logits, logits[:, -3:])
    assert theirs.eval()(tokens, use_cache=False).cache is None


@torch.no_grad()
def test_generate_with_prompts_of_different_lengths(pair):
    ours, theirs = pair
    tokens, mask = left_padded(PROMPTS)
    expected = generate(ours, PROMPTS, 40)
    assert len({*expected[0]}) > 3
    for options in ({}, {"use_cache": False}):
        generated = theirs.generate(tokens, attention_mask=mask, max_new_tokens=40, do_sample=False, **options)
        assert generated[:, tokens.shape[1] :].tolist() == expected


@torch.no_grad()
def test_beams_and_several_samples_do_not_mix_their_states(pair):
    _, theirs = pair
    tokens, mask = left_padded(PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 12}
    for more in ({"num_beams": 3, "do_sample": False}, {"num_return_sequences": 2, "do_sample": True}):
        results = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            results.append(theirs.generate(tokens, use_cache=use_cache, **options, **more))
        assert torch.equal(*results)


@torch.no_grad()
def test_a_conversation_goes_on_from_its_cache(pair):
    _, theirs = pair
    options = {"do_sample": False, "max_new_tokens": 5}
    first = theirs.generate(torch.tensor(PROMPTS[:1]), return_dict_in_generate=True, **options)
    whole = torch.cat([first.sequences, torch.tensor([[3, 1, 4]])], 1)
    expected = theirs.generate(whole, **options)
    assert torch.equal(theirs.generate(whole, cache=first.cache, **options), expected)


def test_every_mixer_in_half_precision(transformers, tmp_path):
    """Gates and norms stay in float32, whether transformers is asked for bfloat16 or finds it in the folder."""
    ours, tokens = model_of([CASES[name] for name in mixers.names()]), torch.tensor(PROMPTS[1:2])
    ours.save_pretrained(tmp_path / "wide")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens)[0])
    ours.bfloat16().save_pretrained(tmp_path / "narrow")
    expected = ours.state_dict()
    for folder, options in (("wide", {"dtype": torch.bfloat16}), ("narrow", {})):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, **options)
        assert theirs.dtype == torch.bfloat16
        for name, value in theirs.model.state_dict().items():
            assert value.dtype == expected[name].dtype and torch.equal(value, expected[name])


def test_what_transformers_saves_is_a_folder_of_ours(pair, transformers, tmp_path):
    ours, theirs = pair
    theirs.save_pretrained(tmp_path / "again")
    again = LanguageModel.from_pretrained(tmp_path / "again")
    assert again.config == ours.config
    assert all(torch.equal(again.state_dict()[name], value) for name, value in ours.state_dict().items())
    with pytest.raises(ValueError, match="leave out state_dict"):
        theirs.save_pretrained(tmp_path / "no", state_dict={})


def test_folders_from_before_transformers_load_as_ever(tmp_path):
    ours = model_of(MIXTURES["recurrent"])
    ours.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "ssm_trn"
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in ("format_version", "model")}))
    assert LanguageModel.from_pretrained(tmp_path).config == ours.config


def test_a_model_from_its_config_alone(transformers, tmp_path):
    model_of(MIXTURES["recurrent"]).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (VOCABULARY, 32, 2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    dt = torch.nn.functional.softplus(model.model.blocks[0].mixer.dt_bias)
    assert dt.min() > 9e-4 and dt.max() < 0.11  # drawn as the paper asks, not by transformers


def test_wrong_folders_and_wrong_calls(transformers, pair, tmp_path):
    ours, theirs = pair
    with pytest.raises(ValueError, match="only a StateCache of an earlier call fits this model"):
        theirs(torch.tensor([[1]]), cache=transformers.DynamicCache())
    with pytest.raises(ValueError, match="vocabulary of an ssm_trn model is part of its config"):
        theirs.resize_token_embeddings(VOCABULARY + 1)
    with pytest.raises(ValueError, match="cannot forget its last tokens"):
        theirs(torch.tensor([[1]]), use_cache=True).cache.crop(-1)
    ours.save_pretrained(tmp_path / "damaged")
    config = json.loads((tmp_path / "damaged" / "config.json").read_text())
    for changes, message in (
        ({"layers": config["model"]["layers"] * 2}, "the weights do not fit the config: .*missing_keys"),
        ({"layers": config["model"]["layers"][:1]}, "the weights do not fit the config: .*unexpected_keys"),
        ({"layers": ["mambo"]}, "unknown mixer 'mambo'"),
    ):
        (tmp_path / "damaged" / "config.json").write_text(json.dumps(config | {"model": config["model"] | changes}))
        with pytest.raises(ValueError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(config | {"format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        transformers.AutoConfig.from_pretrained(tmp_path / "damaged")


SSM_TRN_FIRST = """
import importlib, sys, ssm_trn
importlib.reload(ssm_trn)
assert not {"torch", "transformers"} & {*sys.modules}  # ssm-trn --help is quick
from transformers import GenerationMixin  # imports the table of models while it is itself half imported
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""
TRANSFORMERS_FIRST = """
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert "ssm_trn" not in CONFIG_MAPPING
import ssm_trn
assert "ssm_trn" in CONFIG_MAPPING
"""


@pytest.mark.parametrize("code", [SSM_TRN_FIRST, TRANSFORMERS_FIRST], ids=["ssm_trn first", "transformers first"])
def test_either_may_be_imported_first(transformers, code, tmp_path):
    model_of(["mamba2"]).save_pretrained(tmp_path)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_without_transformers_all_else_works():
    code = """
import sys
sys.modules["transformers"] = None
import ssm_trn.interop.command, ssm_trn.interop.models, ssm_trn.interop.tokenizer
import ssm_trn.interop.auto
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].endswith("pip install 'ssm-trn[hf]'"), ended.stderr


@pytest.fixture(scope="module")
def evaluated(transformers, tokenizer, tmp_path_factory):  # noqa: F811
    """lm-eval's model for a folder, and ours."""
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("run")
    tiny_model("hybrid", tokenizer.vocab_size).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.model")
    export_tokenizer(tokenizer, folder)
    settings = {"batch_size": 4, "max_length": MAX_LENGTH, "device": "cpu"}
    return HFLM(str(folder), **settings, logits_cache=False), HarnessModel(folder, **settings)


def test_lm_evals_own_model_gives_the_same_scores(evaluated, tokenizer):  # noqa: F811
    hf, ours = evaluated
    pairs = [
        (context, continuation)
        for kind in random_requests().values()
        for context, continuation in kind
        # On the others theirs stops with an assertion: longer than max_length, or merged into the context.
        if len(tokenizer.encode(continuation)) < MAX_LENGTH
        and len(tokenizer.encode(context + continuation)) > len(tokenizer.encode(context.rstrip()))
    ]
    asked = instances("loglikelihood", pairs)
    expected, scores = hf.loglikelihood(asked, disable_tqdm=True), ours.loglikelihood(asked, disable_tqdm=True)
    assert len(scores) > 50 and [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], rel=1e-5, abs=1e-5)


def test_lm_evals_own_model_generates_the_same(evaluated):
    hf, ours = evaluated
    generator = random.Random(5)
    options = {"until": [".", "the"], "max_gen_toks": 12, "do_sample": False}
    asked = instances("generate_until", ([text(generator, words), options] for words in (1, 5, 30, 5, 12)))
    theirs, mine = hf.generate_until(asked, disable_tqdm=True), ours.generate_until(asked, disable_tqdm=True)
    assert [answer.replace("\ufffd", "") for answer in theirs] == [answer.replace("\ufffd", "") for answer in mine]
