"""Qwen3-Next as transformers writes it, without experts: gated DeltaNet, and gated attention with partial rotary
positions.

Its norms, but not that of gated DeltaNet, store their weight less 1. Its maps are ordered by head: those of gated
DeltaNet by key head, with q, k, v, z of each, those of attention with query and gate of each head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ssm_trn.interop.formats.parts import (
    LLAMA_PAIRS,
    convolution,
    feed_forward,
    linear,
    llama_frame,
    read_layer_types,
    read_rotary,
    stacked,
    write_layer_types,
    write_rotary,
)
from ssm_trn.interop.mapping import Format, LayerKind, Pair, names, whole
from ssm_trn.interop.weights import Entry, entry
from ssm_trn.mixers.attention import Attention
from ssm_trn.mixers.gated_deltanet import GatedDeltaNet
from ssm_trn.model import Block

_EXPERTS = names(
    """decoder_sparse_step moe_intermediate_size norm_topk_prob num_experts_per_tok output_router_logits
    router_aux_loss_coef shared_expert_intermediate_size"""
)


def by_part(groups: int, *blocks: list[int]) -> Tensor:
    """Rows of stacked maps, each ordered by group, in an order by part.

    Args:
        groups: G, of each map.
        blocks: for each map the rows that each part has in a group.

    Returns:
        int64 [rows]: for the parts one after the other, those of all groups, their place in the stack.
    """
    order, start = [], 0
    for parts in blocks:
        rows = start + torch.arange(groups * sum(parts)).view(groups, -1)
        order += [part.flatten() for part in rows.split(parts, dim=1)]
        start += rows.numel()
    return torch.cat(order)


def _delta_order(mixer: GatedDeltaNet) -> Tensor:
    """Ours is q, k, v, b, a, z; theirs, by key head, q, k, v, z and then b, a."""
    groups, group = mixer.n_key_heads, mixer.n_heads // mixer.n_key_heads
    key, value = mixer.head_dim, group * mixer.value_head_dim
    order = by_part(groups, [key, key, value, value], [group, group])
    q, k, v, z, b, a = order.split([groups * rows for rows in (key, key, value, value, group, group)])
    return torch.cat([q, k, v, b, a, z])


def _attention_order(mixer: Attention) -> Tensor:
    """Ours is q, k, v, gate; theirs, by head, q and gate, then k, v."""
    query, key, value, _ = mixer.splits
    q, gate = by_part(mixer.n_heads, [mixer.head_dim, mixer.head_dim]).chunk(2)
    return torch.cat([q, 2 * query + torch.arange(key + value), gate])


def _norms_and_feed_forward(block: Block) -> Iterator[Entry]:
    yield entry("mixer_norm.weight", "input_layernorm.weight", offset=1.0)
    yield entry("feed_forward_norm.weight", "post_attention_layernorm.weight", offset=1.0)
    yield from feed_forward("mlp", block.feed_forward)


def _linear_weights(block: Block) -> Iterator[Entry]:
    mixer, theirs = block.mixer, "linear_attn"
    yield from _norms_and_feed_forward(block)
    gates = 2 * mixer.n_heads
    rows, maps = [sum(mixer.splits) - gates, gates], [f"{theirs}.in_proj_qkvz", f"{theirs}.in_proj_ba"]
    yield from stacked("mixer.in_proj", maps, rows, order=_delta_order(mixer))
    yield from convolution(f"{theirs}.conv1d", mixer.conv)
    for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight"):
        yield entry(f"mixer.{name}", f"{theirs}.{name}")


def _attention_weights(block: Block) -> Iterator[Entry]:
    mixer, theirs = block.mixer, "self_attn"
    yield from _norms_and_feed_forward(block)
    query, key, value, gate = mixer.splits
    maps, bias = [f"{theirs}.{name}_proj" for name in "qkv"], mixer.in_proj.bias is not None
    yield from stacked("mixer.in_proj", maps, [query + gate, key, value], bias, order=_attention_order(mixer))
    yield from linear("mixer.out_proj", f"{theirs}.o_proj", mixer.out_proj.bias is not None)
    for name in ("q_norm.weight", "k_norm.weight"):
        yield entry(f"mixer.{name}", f"{theirs}.{name}", offset=1.0)


def _read_layers(config: dict[str, Any]) -> list[str]:
    read_rotary(config, fraction=0.25)
    count = whole(config, "num_hidden_layers")
    experts, dense = config.pop("num_experts", 512), config.pop("mlp_only_layers", None) or []
    if experts != 0 and dense != list(range(count)):
        raise ValueError(
            f"config.json has num_experts = {experts!r}: ssm_trn has no mixture of experts, only models with "
            "feed-forward layers alone can be read"
        )
    period = whole({"full_attention_interval": config.pop("full_attention_interval", 4)}, "full_attention_interval")
    return read_layer_types(config, ["linear_attention", "full_attention"], period)


def _write_layers(config: dict[str, Any], kinds: list[str]) -> None:
    write_rotary(config)
    write_layer_types(config, kinds)
    config["num_experts"] = 0


QWEN3_NEXT = Format(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    pairs=LLAMA_PAIRS,
    kinds={
        "linear_attention": LayerKind(
            "gated_deltanet",
            (
                Pair("linear_num_value_heads", "n_heads", 32),
                Pair("linear_num_key_heads", "n_key_heads", 16),
                Pair("linear_key_head_dim", "head_dim", 128),
                Pair("linear_value_head_dim", "value_head_dim", 128),
                Pair("linear_conv_kernel_dim", "conv_width", 4),
                Pair("rms_norm_eps", "norm_eps", 1e-6),
            ),
            _linear_weights,
        ),
        "full_attention": LayerKind(
            "attention",
            (
                Pair("num_attention_heads", "n_heads", 16),
                Pair("num_key_value_heads", "n_kv_heads", 2),
                Pair("head_dim", "head_dim", 256),
                Pair("rope_theta", "rope_theta"),
                Pair("rotary_fraction", "rotary_fraction"),
                Pair("attention_bias", "qkv_bias", False),
                Pair("attention_bias", "out_bias", False),
                Pair("rms_norm_eps", "norm_eps", 1e-6),
            ),
            _attention_weights,
            fixed={"qk_norm": True, "output_gate": True},
        ),
    },
    weights=lambda model: llama_frame(model, offset=1.0),
    layer_prefix="model.layers.{}.",
    read_layers=_read_layers,
    write_layers=_write_layers,
    required={"hidden_act": "silu", "attention_dropout": 0.0},
    ignored=_EXPERTS,
)
