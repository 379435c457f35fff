"""Mamba, Mamba-2 and Falcon Mamba as transformers writes them, and the first two as their authors do.

The authors' package mamba_ssm (state-spaces/mamba) has its options in `ssm_cfg` and pads the vocabulary; its layout is
that of mamba_ssm/models/mixer_seq_simple.py, the options are arguments of its Mamba and Mamba2.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ssm_trn.interop.formats.parts import convolution, linear
from ssm_trn.interop.mapping import Format, LayerKind, Pair, names, require, whole
from ssm_trn.interop.weights import Entry, entry
from ssm_trn.model import Block, LanguageModel

_DRAWING = names("dt_min dt_max dt_init dt_scale dt_init_floor A_init_range conv_init")
_RUNNING = names("use_fast_path use_mem_eff_path chunk_size device dtype layer_idx")


def _mamba_weights(block: Block) -> Iterator[Entry]:
    yield entry("mixer_norm.weight", "norm.weight")
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        yield from linear(f"mixer.{name}", f"mixer.{name}")
    yield entry("mixer.dt_bias", "mixer.dt_proj.bias")
    for name in ("A_log", "D"):
        yield entry(f"mixer.{name}", f"mixer.{name}")
    yield from convolution("mixer.conv1d", block.mixer.conv)


def _mamba2_weights(block: Block) -> Iterator[Entry]:
    yield entry("mixer_norm.weight", "norm.weight")
    for name in ("in_proj.weight", "out_proj.weight", "norm.weight", "A_log", "D", "dt_bias"):
        yield entry(f"mixer.{name}", f"mixer.{name}")
    yield from convolution("mixer.conv1d", block.mixer.conv)


def _frame(embedding: str):
    def weights(model: LanguageModel) -> Iterator[Entry]:
        yield entry("embedding.weight", f"backbone.{embedding}.weight")
        yield entry("norm.weight", "backbone.norm_f.weight")
        if model.head is not None:
            yield entry("head.weight", "lm_head.weight")

    return weights


def _read_layers(config: dict[str, Any]) -> list[str]:
    if config.get("time_step_rank") == "auto":
        config["time_step_rank"] = None
    count = whole(config, "num_hidden_layers")
    del config["num_hidden_layers"]
    return ["layer"] * count


def _write_layers(config: dict[str, Any], kinds: list[str]) -> None:
    config["num_hidden_layers"] = len(kinds)


def _width(config: dict[str, Any]) -> int:
    return whole({"expand": 2} | config, "expand") * whole(config, "hidden_size")


_PAIRS = (
    Pair("vocab_size", "vocab_size"),
    Pair("hidden_size", "d_model"),
    Pair("layer_norm_epsilon", "norm_eps", 1e-5),
    Pair("tie_word_embeddings", "tie_embeddings", True),
)
_MAMBA_PAIRS = (
    Pair("state_size", "d_state", 16),
    Pair("expand", "expand", 2),
    Pair("time_step_rank", "dt_rank", None),
    Pair("conv_kernel", "conv_width", 4),
)
_PLAIN = {"hidden_act": "silu", "use_bias": False, "use_conv_bias": True}

MAMBA = Format(
    name="mamba",
    architecture="MambaForCausalLM",
    pairs=_PAIRS,
    kinds={"layer": LayerKind("mamba", _MAMBA_PAIRS, _mamba_weights, feed_forward="none")},
    weights=_frame("embeddings"),
    layer_prefix="backbone.layers.{}.",
    read_layers=_read_layers,
    write_layers=_write_layers,
    required=_PLAIN,
    computed={"intermediate_size": _width},
    # The released models' config.json still has the options of state-spaces/mamba, which transformers does not read.
    ignored=names(
        """use_mambapy use_associative_scan d_model n_layer d_inner ssm_cfg rms_norm fused_add_norm
        pad_vocab_size_multiple"""
    ),
    renames=((r"^backbone\.embedding\.", "backbone.embeddings."),),
)

FALCON_MAMBA = replace(
    MAMBA,
    name="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    kinds={
        "layer": LayerKind(
            "mamba",
            (*_MAMBA_PAIRS, Pair("mixer_rms_eps", "bcdt_norm_eps", 1e-6)),
            _mamba_weights,
            feed_forward="none",
        )
    },
    ignored=MAMBA.ignored | {"use_falcon_mambapy"},
)

MAMBA2 = replace(
    MAMBA,
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    pairs=(*_PAIRS[:-1], Pair("tie_word_embeddings", "tie_embeddings", False)),
    kinds={
        "layer": LayerKind(
            "mamba2",
            (
                Pair("state_size", "d_state", 128),
                Pair("expand", "expand", 2),
                Pair("head_dim", "head_dim", 64),
                Pair("n_groups", "n_groups", 8),
                Pair("conv_kernel", "conv_width", 4),
                Pair("layer_norm_epsilon", "norm_eps", 1e-5),
            ),
            _mamba2_weights,
            feed_forward="none",
        )
    },
    required={**_PLAIN, "time_step_limit": [0.0, math.inf]},
    computed={"num_heads": lambda config: _width(config) // whole({"head_dim": 64} | config, "head_dim")},
    ignored=names("chunk_size time_step_rank"),
)


def _read_state_spaces(layer: str):
    def read(config: dict[str, Any]) -> list[str]:
        options = config.pop("ssm_cfg", None) or {}
        if not isinstance(options, dict):
            raise ValueError(f"config.json has ssm_cfg = {options!r}, which should be an object")
        require({"layer": options.get("layer", "Mamba1")}, "layer", layer)
        config |= {f"ssm_cfg.{name}": value for name, value in options.items() if name != "layer"}
        if config.get("ssm_cfg.dt_rank") == "auto":
            config["ssm_cfg.dt_rank"] = None
        count = whole(config, "n_layer")
        del config["n_layer"]
        return ["layer"] * count

    return read


def _write_state_spaces(layer: str):
    def write(config: dict[str, Any], kinds: list[str]) -> None:
        options = {name.removeprefix("ssm_cfg."): config.pop(name) for name in list(config) if "." in name}
        config |= {"n_layer": len(kinds), "ssm_cfg": {"layer": layer, **options}, "rms_norm": True}

    return write


_STATE_SPACES_PAIRS = (
    Pair("vocab_size", "vocab_size"),
    Pair("d_model", "d_model"),
    Pair("tie_embeddings", "tie_embeddings", True),
    Pair("pad_vocab_size_multiple", "vocab_multiple", 8),
)

STATE_SPACES_MAMBA = Format(
    name="state_spaces_mamba",
    architecture=None,
    pairs=_STATE_SPACES_PAIRS,
    kinds={
        "layer": LayerKind(
            "mamba",
            (
                Pair("ssm_cfg.d_state", "d_state", 16),
                Pair("ssm_cfg.expand", "expand", 2),
                Pair("ssm_cfg.dt_rank", "dt_rank", None),
                Pair("ssm_cfg.d_conv", "conv_width", 4),
            ),
            _mamba_weights,
            feed_forward="none",
        )
    },
    weights=_frame("embedding"),
    layer_prefix="backbone.layers.{}.",
    read_layers=_read_state_spaces("Mamba1"),
    write_layers=_write_state_spaces("Mamba1"),
    required={
        "rms_norm": True,
        "d_intermediate": 0,
        "attn_layer_idx": [],
        "ssm_cfg.conv_bias": True,
        "ssm_cfg.bias": False,
    },
    ignored=names("fused_add_norm attn_cfg") | {f"ssm_cfg.{name}" for name in _DRAWING | _RUNNING},
    pickled=True,
    padded=True,
)

STATE_SPACES_MAMBA2 = replace(
    STATE_SPACES_MAMBA,
    name="state_spaces_mamba2",
    kinds={
        "layer": LayerKind(
            "mamba2",
            (
                Pair("ssm_cfg.d_state", "d_state", 128),
                Pair("ssm_cfg.expand", "expand", 2),
                Pair("ssm_cfg.headdim", "head_dim", 64),
                Pair("ssm_cfg.ngroups", "n_groups", 1),
                Pair("ssm_cfg.d_conv", "conv_width", 4),
                Pair("ssm_cfg.norm_before_gate", "norm_before_gate", False),
            ),
            _mamba2_weights,
            feed_forward="none",
        )
    },
    read_layers=_read_state_spaces("Mamba2"),
    write_layers=_write_state_spaces("Mamba2"),
    required={
        **STATE_SPACES_MAMBA.required,
        "ssm_cfg.rmsnorm": True,
        "ssm_cfg.D_has_hdim": False,
        "ssm_cfg.d_ssm": None,
        "ssm_cfg.dt_limit": [0.0, math.inf],
    },
)
