"""OLMo Hybrid as transformers writes it: gated DeltaNet with norms before it, attention with norms behind it."""

from collections.abc import Iterator
from typing import Any

from ssm_trn.interop.formats.parts import (
    LLAMA_PAIRS,
    attention_maps,
    feed_forward,
    llama_frame,
    read_layer_types,
    read_rotary,
    stacked,
    write_layer_types,
    write_rotary,
)
from ssm_trn.interop.mapping import Format, LayerKind, Pair, names
from ssm_trn.interop.weights import Entry, entry
from ssm_trn.model import Block

_DRAWING = names("linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor")


def _linear_weights(block: Block) -> Iterator[Entry]:
    mixer, theirs = block.mixer, "linear_attn"
    yield entry("mixer_norm.weight", "input_layernorm.weight")
    yield entry("feed_forward_norm.weight", "post_attention_layernorm.weight")
    yield from feed_forward("mlp", block.feed_forward)
    rows = [*mixer.convolved_splits, *mixer.splits[1:]]
    yield from stacked("mixer.in_proj", [f"{theirs}.{name}_proj" for name in "qkvbag"], rows)
    # transformers 5.24 saves the three convolutions cut into thirds of the same length.
    convolutions, tail = [f"{theirs}.{name}_conv1d" for name in "qkv"], (1, mixer.conv.weight.shape[1])
    yield from stacked("mixer.conv", convolutions, mixer.convolved_splits, tail=tail, any_cut=True)
    for name in ("A_log", "dt_bias"):
        yield entry(f"mixer.{name}", f"{theirs}.{name}")
    yield entry("mixer.norm.weight", f"{theirs}.o_norm.weight")
    yield entry("mixer.out_proj.weight", f"{theirs}.o_proj.weight")


def _attention_weights(block: Block) -> Iterator[Entry]:
    yield entry("mixer_norm.weight", "post_attention_layernorm.weight")
    yield entry("feed_forward_norm.weight", "post_feedforward_layernorm.weight")
    yield from feed_forward("mlp", block.feed_forward)
    yield from attention_maps("self_attn", block.mixer)
    for name in ("q_norm.weight", "k_norm.weight"):
        yield entry(f"mixer.{name}", f"self_attn.{name}")


def _read_layers(config: dict[str, Any]) -> list[str]:
    read_rotary(config)
    return read_layer_types(config, ["linear_attention", "full_attention"], period=4)


def _write_layers(config: dict[str, Any], kinds: list[str]) -> None:
    if len(set(kinds)) < 2:
        raise ValueError("the format olmo_hybrid has models with both gated_deltanet and attention, not of one alone")
    write_rotary(config)
    write_layer_types(config, kinds)


OLMO_HYBRID = Format(
    name="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    pairs=LLAMA_PAIRS,
    kinds={
        "linear_attention": LayerKind(
            "gated_deltanet",
            (
                Pair("linear_num_value_heads", "n_heads"),
                Pair("linear_num_key_heads", "n_key_heads"),
                Pair("linear_key_head_dim", "head_dim"),
                Pair("linear_value_head_dim", "value_head_dim"),
                Pair("linear_conv_kernel_dim", "conv_width", 4),
                Pair("linear_allow_neg_eigval", "negative_eigenvalues", True),
            ),
            _linear_weights,
        ),
        "full_attention": LayerKind(
            "attention",
            (
                Pair("num_attention_heads", "n_heads"),
                Pair("num_key_value_heads", "n_kv_heads", None),
                Pair("head_dim", "head_dim", None),
                Pair("rope_theta", "rope_theta", optional=True),
                Pair("attention_bias", "qkv_bias", False),
                Pair("attention_bias", "out_bias", False),
                Pair("rms_norm_eps", "norm_eps", 1e-6),
            ),
            _attention_weights,
            fixed={"qk_norm": True, "qk_norm_across_heads": True},
            norm_output=True,
        ),
    },
    weights=llama_frame,
    layer_prefix="model.layers.{}.",
    read_layers=_read_layers,
    write_layers=_write_layers,
    required={"hidden_act": "silu", "attention_dropout": 0.0},
    ignored=_DRAWING,
    renames=(
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
)
