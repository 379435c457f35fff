"""RecurrentGemma (Griffin) as transformers writes it: RG-LRU and attention over a window, with GeGLU.

Its norms store their weight less 1; `intermediate_size` is twice the width of the feed-forward layers; embeddings are
scaled by sqrt(d_model) rounded to bfloat16.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ssm_trn.interop.formats.parts import (
    LLAMA_PAIRS,
    attention_maps,
    convolution,
    feed_forward,
    linear,
    llama_frame,
    read_rotary,
    stacked,
    write_rotary,
)
from ssm_trn.interop.mapping import Format, LayerKind, Pair, require, whole
from ssm_trn.interop.weights import Entry, entry
from ssm_trn.model import Block


def _norms_and_feed_forward(block: Block) -> Iterator[Entry]:
    yield entry("mixer_norm.weight", "temporal_pre_norm.weight", offset=1.0)
    yield entry("feed_forward_norm.weight", "channel_pre_norm.weight", offset=1.0)
    yield from feed_forward("mlp_block", block.feed_forward)


def _recurrent_weights(block: Block) -> Iterator[Entry]:
    mixer, theirs = block.mixer, "temporal_block"
    yield from _norms_and_feed_forward(block)
    width = mixer.n_heads * mixer.head_dim
    yield from stacked("mixer.in_proj", [f"{theirs}.linear_x", f"{theirs}.linear_y"], [width, width], bias=True)
    yield from convolution(f"{theirs}.conv_1d", mixer.conv)
    for ours, name in (("input_gate", "input_gate"), ("recurrence_gate", "recurrent_gate")):
        yield entry(f"mixer.{ours}.weight", f"{theirs}.rg_lru.{name}_weight")
        yield entry(f"mixer.{ours}.bias", f"{theirs}.rg_lru.{name}_bias", tail=(mixer.head_dim,))
    yield entry("mixer.Lambda", f"{theirs}.rg_lru.recurrent_param")
    yield from linear("mixer.out_proj", f"{theirs}.linear_out", bias=True)


def _attention_weights(block: Block) -> Iterator[Entry]:
    yield from _norms_and_feed_forward(block)
    yield from attention_maps("temporal_block", block.mixer)


def _read_layers(config: dict[str, Any]) -> list[str]:
    read_rotary(config, fraction=0.5)
    count, width = whole(config, "num_hidden_layers"), whole(config, "intermediate_size")
    del config["num_hidden_layers"]
    require(config, "intermediate_size", width // 2 * 2)
    config["intermediate_size"] = width // 2
    heads, channels = whole(config, "num_attention_heads"), config.pop("lru_width", None) or config.get("hidden_size")
    require({"lru_width": channels}, "lru_width", whole({"lru_width": channels}, "lru_width") // heads * heads)
    config["lru_head_dim"] = channels // heads
    period = config.pop("block_types", ["recurrent", "recurrent", "attention"])
    for name in ("_block_types", "layers_block_type"):
        config.pop(name, None)  # the same again
    if not isinstance(period, list) or not period or not {*map(str, period)} <= {"recurrent", "attention"}:
        raise ValueError(f"config.json has block_types = {period!r}, which should be a list of recurrent and attention")
    return (period * count)[:count]


def _write_layers(config: dict[str, Any], kinds: list[str]) -> None:
    write_rotary(config)
    config["num_hidden_layers"], config["block_types"] = len(kinds), kinds
    config["intermediate_size"] *= 2
    if "lru_head_dim" in config:
        config["lru_width"] = config.pop("lru_head_dim") * config["num_attention_heads"]


RECURRENT_GEMMA = Format(
    name="recurrent_gemma",
    architecture="RecurrentGemmaForCausalLM",
    pairs=(
        *LLAMA_PAIRS[:-1],
        Pair("tie_word_embeddings", "tie_embeddings", True),
        Pair("logits_soft_cap", "logit_soft_cap", 30.0),
    ),
    kinds={
        "recurrent": LayerKind(
            "rg_lru",
            (
                Pair("num_attention_heads", "n_heads"),
                Pair("lru_head_dim", "head_dim"),
                Pair("conv1d_width", "conv_width", 4),
            ),
            _recurrent_weights,
            feed_forward="geglu",
        ),
        "attention": LayerKind(
            "attention",
            (
                Pair("num_attention_heads", "n_heads"),
                Pair("num_key_value_heads", "n_kv_heads", None),
                Pair("head_dim", "head_dim"),
                Pair("attention_window_size", "window", 2048),
                Pair("rope_theta", "rope_theta"),
                Pair("rotary_fraction", "rotary_fraction"),
                Pair("attention_bias", "qkv_bias", False),
            ),
            _attention_weights,
            fixed={"out_bias": True},
            feed_forward="geglu",
        ),
    },
    weights=lambda model: llama_frame(model, norm="final_norm", offset=1.0),
    layer_prefix="model.layers.{}.",
    read_layers=_read_layers,
    write_layers=_write_layers,
    fixed={
        "feed_forward_bias": lambda d_model: True,
        "embedding_scale": lambda d_model: torch.tensor(d_model**0.5, dtype=torch.bfloat16).item(),
    },
    required={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "embeddings_scale_by_sqrt_dim": True,
    },
    computed={"head_dim": lambda config: whole(config, "hidden_size") // whole(config, "num_attention_heads")},
    unwritten=frozenset({"head_dim"}),
    ignored=frozenset({"w_init_variance_scale", "final_w_init_variance_scale"}),
)
