"""Llama as transformers writes it: attention with rotary positions and SwiGLU."""

from collections.abc import Iterator
from typing import Any

from ssm_trn.interop.formats.parts import (
    LLAMA_PAIRS,
    attention_maps,
    feed_forward,
    llama_frame,
    read_rotary,
    write_rotary,
)
from ssm_trn.interop.mapping import Format, LayerKind, Pair, whole
from ssm_trn.interop.weights import Entry, entry
from ssm_trn.model import Block


def _weights(block: Block) -> Iterator[Entry]:
    yield entry("mixer_norm.weight", "input_layernorm.weight")
    yield from attention_maps("self_attn", block.mixer)
    yield entry("feed_forward_norm.weight", "post_attention_layernorm.weight")
    yield from feed_forward("mlp", block.feed_forward)


def _read_layers(config: dict[str, Any]) -> list[str]:
    read_rotary(config)
    count = whole(config, "num_hidden_layers")
    del config["num_hidden_layers"]
    return ["layer"] * count


def _write_layers(config: dict[str, Any], kinds: list[str]) -> None:
    write_rotary(config)
    config["num_hidden_layers"] = len(kinds)


LLAMA = Format(
    name="llama",
    architecture="LlamaForCausalLM",
    pairs=(*LLAMA_PAIRS, Pair("mlp_bias", "feed_forward_bias", False)),
    kinds={
        "layer": LayerKind(
            "attention",
            (
                Pair("num_attention_heads", "n_heads"),
                Pair("num_key_value_heads", "n_kv_heads", None),
                Pair("head_dim", "head_dim", None),
                Pair("rope_theta", "rope_theta"),
                Pair("attention_bias", "qkv_bias", False),
                Pair("attention_bias", "out_bias", False),
            ),
            _weights,
        )
    },
    weights=llama_frame,
    layer_prefix="model.layers.{}.",
    read_layers=_read_layers,
    write_layers=_write_layers,
    required={"hidden_act": "silu", "attention_dropout": 0.0},
    ignored=frozenset({"pretraining_tp"}),  # how the products are cut, not what they are
    renames=((r".*\.rotary_emb\.inv_freq$", ""),),  # a constant that earlier releases stored
)
