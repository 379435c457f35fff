"""Kimi Linear as transformers writes it, as far as its layers are Kimi Delta Attention with SwiGLU.

The released models also have latent attention and mixtures of experts, which ssm_trn lacks.
"""

from collections.abc import Iterator
from typing import Any

from ssm_trn.interop.formats.parts import (
    LLAMA_PAIRS,
    feed_forward,
    llama_frame,
    read_layer_types,
    stacked,
    write_layer_types,
)
from ssm_trn.interop.mapping import Format, LayerKind, Pair, names, whole
from ssm_trn.interop.weights import Entry, entry
from ssm_trn.model import Block

# Of the layers that a model read here does not have.
_LATENT_ATTENTION = names(
    """num_attention_heads num_key_value_heads head_dim kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim
    qk_rope_head_dim v_head_dim attention_bias attention_dropout"""
)
_EXPERTS = names(
    """num_experts num_local_experts num_experts_per_token num_experts_per_tok num_shared_experts n_shared_experts
    moe_intermediate_size moe_renormalize norm_topk_prob num_expert_group n_group topk_group routed_scaling_factor
    output_router_logits"""
)


def _weights(block: Block) -> Iterator[Entry]:
    mixer, theirs = block.mixer, "self_attn"
    yield entry("mixer_norm.weight", "input_layernorm.weight")
    yield entry("feed_forward_norm.weight", "post_attention_layernorm.weight")
    yield from feed_forward("mlp", block.feed_forward)
    maps = [f"{theirs}.{name}_proj" for name in ("q", "k", "v", "b", "f_a", "g_a")]
    yield from stacked("mixer.in_proj", maps, [*mixer.convolved_splits, *mixer.splits[1:]])
    convolutions, tail = [f"{theirs}.{name}_conv1d" for name in "qkv"], (1, mixer.conv.weight.shape[1])
    yield from stacked("mixer.conv", convolutions, mixer.convolved_splits, tail=tail)
    yield entry("mixer.A_log", f"{theirs}.A_log", tail=(1, mixer.n_heads, 1))
    yield entry("mixer.dt_bias", f"{theirs}.dt_bias")
    for ours, name in (
        ("forget_proj", "f_b_proj"),
        ("gate_proj", "g_b_proj"),
        ("norm", "o_norm"),
        ("out_proj", "o_proj"),
    ):
        yield entry(f"mixer.{ours}.weight", f"{theirs}.{name}.weight")


def _read_layers(config: dict[str, Any]) -> list[str]:
    count, dense = whole(config, "num_hidden_layers"), config.pop("mlp_layer_types", None)
    if dense != ["dense"] * count:
        raise ValueError(
            "config.json has no mlp_layer_types that are all 'dense': ssm_trn has no mixture of experts, only models "
            "with feed-forward layers alone can be read"
        )
    types = config.get("layer_types")
    if isinstance(types, list) and "full_attention" in types:
        raise ValueError(
            "config.json has layer_types with full_attention, which is multi-head latent attention here: ssm_trn "
            "lacks it"
        )
    return read_layer_types(config, ["linear_attention"], period=4)


def _write_layers(config: dict[str, Any], kinds: list[str]) -> None:
    write_layer_types(config, kinds)
    config["mlp_layer_types"] = ["dense"] * len(kinds)


KIMI_LINEAR = Format(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    pairs=(*LLAMA_PAIRS[:-2], Pair("rms_norm_eps", "norm_eps", 1e-5), LLAMA_PAIRS[-1]),
    kinds={
        "linear_attention": LayerKind(
            "kda",
            (
                Pair("linear_num_heads", "n_heads", 32),
                Pair("linear_head_dim", "head_dim", 128),
                Pair("key_heads", "n_key_heads"),
                Pair("value_head_dim", "value_head_dim"),
                Pair("linear_conv_kernel_dim", "conv_width", 4),
                Pair("rms_norm_eps", "norm_eps", 1e-5),
            ),
            _weights,
        )
    },
    weights=llama_frame,
    layer_prefix="model.layers.{}.",
    read_layers=_read_layers,
    write_layers=_write_layers,
    required={"hidden_act": "silu"},
    computed={
        "key_heads": lambda config: config.get("linear_num_heads", 32),
        "value_head_dim": lambda config: config.get("linear_head_dim", 128),
    },
    unwritten=frozenset({"key_heads", "value_head_dim"}),
    ignored=_LATENT_ATTENTION | _EXPERTS | {"model_max_length", "pretraining_tp"},
    renames=((r"\.block_sparse_moe\.", ".mlp."), (r"\.forget_gate\.", ".")),
)
