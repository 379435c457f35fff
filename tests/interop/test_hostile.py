"""Folders that are damaged, made to harm, or beyond what our models can do: one sentence each, and nothing is run."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssm_trn import interop

from .models import CASES, theirs_of

MISSING = object()
CONFIGS = [
    ("mamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu': a model of ssm_trn can only have 'silu' there"),
    ("mamba", {"use_bias": True}, "use_bias = True"),
    ("mamba", {"use_conv_bias": False}, "use_conv_bias = False"),
    ("mamba", {"use_conv_bias": 1}, "use_conv_bias = 1"),
    ("mamba", {"hidden_size": "32"}, "hidden_size = '32', which should be a whole number of at least 1"),
    ("mamba", {"hidden_size": MISSING}, "hidden_size = None, which should be a whole number"),
    ("mamba", {"vocab_size": MISSING}, "config.json lacks vocab_size"),
    ("mamba", {"vocab_size": None}, "vocab_size = None, which should have a value"),
    ("mamba", {"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
    ("mamba", {"state_size": [16]}, r"d_state is \[16\], which should be of type int"),
    ("mamba", {"state_size": -4}, "d_state is -4; it must be positive"),
    ("mamba", {"num_hidden_layers": 10**9}, "tells of 1000000000 layers, and there are 22 tensors"),
    ("mamba", {"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0, which should be a whole number"),
    ("mamba", {"num_hidden_layers": 0}, "num_hidden_layers = 0, which should be a whole number of at least 1"),
    ("mamba", {"intermediate_size": 65}, "intermediate_size = 65: a model of ssm_trn can only have 64 there"),
    ("mamba", {"hidden_size": 10**18, "intermediate_size": 2 * 10**18}, "a model that no machine can hold"),
    (
        "mamba",
        {"hidden_size": 64, "intermediate_size": 128},
        r"of another shape .*\[48, 32\] instead of \[48, 64\]",
    ),
    ("mamba", {"vocab_size": 10**30}, "a model that no machine can hold"),
    ("mamba", {"sliding_window": 4}, "options unknown to the format mamba: sliding_window = 4"),
    ("mamba", {"quantization_config": {"bits": 4}}, "options unknown to the format mamba: quantization_config"),
    ("mamba", {"model_type": "mambo"}, "model_type 'mambo', which cannot be read: choose a model of one of mamba"),
    ("mamba", {"model_type": ["mamba"]}, "cannot be read"),
    ("mamba", {"model_type": MISSING}, "model_type None, which cannot be read"),
    ("mamba2", {"num_heads": 5}, "num_heads = 5: a model of ssm_trn can only have 4 there"),
    ("mamba2", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit = \[0.001, 0.1\]"),
    ("mamba2", {"head_dim": 0}, "head_dim = 0, which should be a whole number of at least 1"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "rope_type = 'llama3'"),
    ("llama", {"rope_parameters": MISSING, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "has factor in rope_parameters"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta = None, which should have a value"),
    ("llama", {"rope_parameters": 5}, "rope_parameters = 5, which should be an object"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ("llama", {"num_attention_heads": 5}, "n_heads 5 is not a multiple of n_kv_heads 2"),
    ("qwen3_next", {"num_experts": 512}, "num_experts = 512: ssm_trn has no mixture of experts"),
    (
        "qwen3_next",
        {"layer_types": ["linear_attention", "sliding_attention"]},
        r"layer_types\[1\] = 'sliding_attention'",
    ),
    ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types that are no list of 2 names"),
    ("qwen3_next", {"full_attention_interval": 0, "layer_types": MISSING}, "full_attention_interval = 0"),
    ("kimi_linear", {"mlp_layer_types": ["dense", "sparse"]}, "ssm_trn has no mixture of experts"),
    ("kimi_linear", {"layer_types": ["linear_attention", "full_attention"]}, "multi-head latent attention"),
    ("recurrent_gemma", {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
    ("recurrent_gemma", {"lru_width": 34}, "lru_width = 34: a model of ssm_trn can only have 32 there"),
    ("recurrent_gemma", {"block_types": ["recurrent", "mamba"]}, "should be a list of recurrent and attention"),
    ("recurrent_gemma", {"block_types": []}, "should be a list of recurrent and attention"),
    ("recurrent_gemma", {"intermediate_size": 41}, "intermediate_size = 41"),
]


@pytest.fixture(scope="module")
def folders(transformers, tmp_path_factory):
    made = {}
    for case in {case for case, _, _ in CONFIGS}:
        assert case in CASES
        made[case] = tmp_path_factory.mktemp(case)
        theirs_of(transformers, case).save_pretrained(made[case])
    return made


@pytest.fixture
def folder(folders, tmp_path):
    """A function: a copy of a case's folder with changes to its config.json."""

    def make(case, changes=None):
        shutil.copytree(folders[case], tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text()) | (changes or {})
        config = {name: value for name, value in config.items() if value is not MISSING}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.mark.parametrize(("case", "changes", "message"), CONFIGS)
def test_configs(folder, case, changes, message):
    place = folder(case, changes)
    with pytest.raises(ValueError, match=message) as raised:
        interop.load(place)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "[1]", '"a"', "{", "null", "[" * 100_000, '{"a": NaN', "\udcff"])
def test_what_is_no_config(folder, content):
    place = folder("mamba")
    (place / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="config.json is (not JSON|no JSON object)"):
        interop.load(place)


def test_missing_files(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere holds no model.*ask for it with online"):
        interop.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no model: there is no config.json$"):
        interop.load(tmp_path / "empty")
    place = folder("mamba")
    (place / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no model.safetensors and no pytorch_model.bin"):
        interop.load(place)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, "'../secret.safetensors', which is no file of its own folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd', which is no file of its own folder"),
        ({"weight_map": {"a": "part.safetensors"}}, "lacks part.safetensors"),
        ({"weight_map": {"a": "whole.safetensors"}}, "the files of .* lack a"),
        ({"weight_map": {"a": 3}}, "does not say which file holds which tensor"),
        ({}, "does not say which file holds which tensor"),
    ],
)
def test_indices_of_several_files(folder, index, message):
    place = folder("mamba")
    (place / "model.safetensors").rename(place / "whole.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        interop.load(place)


def test_files_of_weights_that_are_none(folder):
    place = folder("mamba")
    weights = {name: value.clone() for name, value in load_file(place / "model.safetensors").items()}
    whole = (place / "model.safetensors").read_bytes()
    for content in (b"", b"12", whole[:-8], b"\xff" * 100):
        (place / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="is not a safetensors file, or a damaged one"):
            interop.load(place)
    name = next(iter(weights))
    for value in (weights[name].to(torch.int8), weights[name].to(torch.float8_e4m3fn)):
        save_file(weights | {name: value}, place / "model.safetensors")
        with pytest.raises(ValueError, match="only weights in 16, 32 or 64 bits can be read"):
            interop.load(place)


def test_a_name_on_the_hub_is_only_fetched_when_asked_for(folder, monkeypatch):
    import huggingface_hub

    asked, place = [], folder("mamba")

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError):
        interop.load("state-spaces/mamba-130m")
    assert asked == []
    interop.load("state-spaces/mamba-130m", online=True)
    ((name, patterns),) = asked
    assert name == "state-spaces/mamba-130m" and not any(pattern.endswith((".bin", ".py")) for pattern in patterns)
