"""Small models of transformers with random weights, and ours with the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ssm_trn.config import ModelConfig
from ssm_trn.model import LanguageModel

VOCABULARY, D_MODEL, LAYERS, D_FF = 48, 32, 2, 40

Weights = dict[str, torch.Tensor]


def below(weights: Weights, prefix: str) -> Weights:
    """The weights whose name starts with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def attention_weights(w: Weights, config) -> Weights:
    mapped = {
        "in_proj.weight": torch.cat([w[f"{part}_proj.weight"] for part in "qkv"]),
        "out_proj.weight": w["o_proj.weight"],
    }
    return mapped | {name: value for name, value in w.items() if name in ("q_norm.weight", "k_norm.weight")}


def mamba_weights(w: Weights, config) -> Weights:
    same = {name: w[name] for name in ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight", "A_log")}
    return {
        **same,
        "D": w["D"],
        "dt_bias": w["dt_proj.bias"],
        "conv.weight": w["conv1d.weight"][:, 0],
        "conv.bias": w["conv1d.bias"],
    }


def mamba2_weights(w: Weights, config) -> Weights:
    same = ("in_proj.weight", "out_proj.weight", "norm.weight", "A_log", "D", "dt_bias")
    conv = {"conv.weight": w["conv1d.weight"][:, 0], "conv.bias": w["conv1d.bias"]}
    return {name: w[name] for name in same} | conv


def qwen3_next_weights(w: Weights, config) -> Weights:
    """Their projections are ordered by key head, ours by what they project to."""
    key_heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // key_heads
    value = group * config.linear_value_head_dim
    q, k, v, z = w["in_proj_qkvz.weight"].unflatten(0, (key_heads, -1)).split([key, key, value, value], dim=1)
    b, a = w["in_proj_ba.weight"].unflatten(0, (key_heads, -1)).split(group, dim=1)
    return {
        "in_proj.weight": torch.cat([part.flatten(0, 1) for part in (q, k, v, b, a, z)]),
        "conv.weight": w["conv1d.weight"][:, 0],
        **{name: w[name] for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")},
    }


def olmo_hybrid_weights(w: Weights, config) -> Weights:
    return {
        "in_proj.weight": torch.cat([w[f"{part}_proj.weight"] for part in "qkvbag"]),
        "conv.weight": w["conv1d.weight"][:, 0],
        "A_log": w["A_log"],
        "dt_bias": w["dt_bias"],
        "norm.weight": w["o_norm.weight"],
        "out_proj.weight": w["o_proj.weight"],
    }


def kimi_linear_weights(w: Weights, config) -> Weights:
    inputs = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
    return {
        "in_proj.weight": torch.cat([w[f"{part}.weight"] for part in inputs]),
        "conv.weight": w["conv1d.weight"][:, 0],
        "forget_proj.weight": w["forget_gate.f_b_proj.weight"],
        "gate_proj.weight": w["g_b_proj.weight"],
        "A_log": w["forget_gate.A_log"].flatten(),
        "dt_bias": w["forget_gate.dt_bias"],
        "norm.weight": w["o_norm.weight"],
        "out_proj.weight": w["o_proj.weight"],
    }


def import_transformers():
    """transformers, or a skipped test: earlier releases lack some of the models and name their caches otherwise."""
    return pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24, of '.[dev]'")


@dataclass(frozen=True)
class Witness:
    """A model class of transformers with its options, our layer that stands for one of its layers, and how the weights
    of its mixers, named `mixer_name`, become those of ours."""

    model: str
    options: dict[str, Any]
    layer: dict[str, Any]
    mixer_weights: Callable[[Weights, Any], Weights]
    mixer_name: str = "linear_attn"
    norm_offset: float = 0.0  # what their norms between the layers add to their weight

    def pair(self):
        """Their model and ours with the same random weights, norms and biases included."""
        model = getattr(import_transformers(), self.model)
        torch.manual_seed(0)
        theirs = model(model.config_class(**{**SIZE, **self.options})).eval()
        if len(theirs.base_model.layers) > LAYERS:
            theirs.base_model.layers = theirs.base_model.layers[:LAYERS]
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
        ours = LanguageModel(ModelConfig(VOCABULARY, D_MODEL, [self.layer] * LAYERS, d_ff=D_FF, tie_embeddings=False))
        ours.load_state_dict(self.mapped(theirs.state_dict(), theirs.config))
        return theirs, ours

    def mapped(self, weights: Weights, config) -> Weights:
        """Their weights under our names."""
        if "backbone.norm_f.weight" in weights:  # Mamba's names
            base, embedding, mixer_norm, norm = "backbone.", "embeddings.weight", "norm.weight", "norm_f.weight"
        else:
            base, embedding, mixer_norm, norm = "model.", "embed_tokens.weight", "input_layernorm.weight", "norm.weight"
        ours = {
            "embedding.weight": weights[base + embedding],
            "norm.weight": weights[base + norm] + self.norm_offset,
            "head.weight": weights["lm_head.weight"],
        }
        for i in range(LAYERS):
            layer = below(weights, f"{base}layers.{i}.")
            block = {"mixer_norm.weight": layer[mixer_norm] + self.norm_offset}
            for name, value in self.mixer_weights(below(layer, f"{self.mixer_name}."), config).items():
                block[f"mixer.{name}"] = value
            if "mlp.down_proj.weight" in layer:
                gate_and_up = layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]
                block["feed_forward_norm.weight"] = layer["post_attention_layernorm.weight"] + self.norm_offset
                block["feed_forward.gate_and_up.weight"] = torch.cat(gate_and_up)
                block["feed_forward.out_proj.weight"] = layer["mlp.down_proj.weight"]
            ours |= {f"blocks.{i}.{name}": value for name, value in block.items()}
        return ours

    def logits(self, theirs, tokens, mask, cache=None):
        """Their logits after tokens [B, T], and their cache; mask [B, S] covers the tokens in the cache as well."""
        positions = torch.arange(mask.shape[1])[-tokens.shape[1] :].expand_as(tokens)
        if self.mixer_name != "self_attn" or "layer_types" in self.options:  # recurrent: they mask only new tokens
            mask = mask[:, -tokens.shape[1] :] if tokens.shape[1] > 1 else None
        if "layer_types" in self.options:  # given by type, as a model without attention cannot make masks for it
            mask = {"full_attention": None, "linear_attention": mask}
        out = theirs(tokens, attention_mask=mask, position_ids=positions, use_cache=True, cache=cache)
        return out.logits, out.cache


SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": D_MODEL,
    "num_hidden_layers": LAYERS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
TRANSFORMER = {"intermediate_size": D_FF, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
LINEAR = {**TRANSFORMER, "layer_types": ["linear_attention"] * LAYERS}
ATTENTION = {"mixer": "attention", "n_heads": 4, "n_kv_heads": 2}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
GATED_DELTANET = {"mixer": "gated_deltanet", "n_heads": 4, "n_key_heads": 2, "head_dim": 8, "value_head_dim": 12}


def mamba2_witness(groups: int) -> Witness:
    options = {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": groups, "chunk_size": 16}
    layer = {"mixer": "mamba2", "d_state": 8, "head_dim": 16, "n_groups": groups, "feed_forward": "none"}
    return Witness("Mamba2ForCausalLM", options, layer, mamba2_weights, "mixer")


WITNESSES = {
    "attention: Llama": Witness("LlamaForCausalLM", TRANSFORMER, ATTENTION, attention_weights, "self_attn"),
    "attention, window: Mistral": Witness(
        "MistralForCausalLM",
        {**TRANSFORMER, "sliding_window": 5},
        {**ATTENTION, "window": 5},
        attention_weights,
        "self_attn",
    ),
    "attention, QK-norm: Qwen3": Witness(
        "Qwen3ForCausalLM",
        {**TRANSFORMER, "head_dim": 12},
        {**ATTENTION, "head_dim": 12, "qk_norm": True},
        attention_weights,
        "self_attn",
    ),
    "mamba: Mamba": Witness(
        "MambaForCausalLM",
        {"state_size": 4},
        {"mixer": "mamba", "d_state": 4, "feed_forward": "none"},
        mamba_weights,
        "mixer",
    ),
    "mamba2: Mamba-2, 1 group": mamba2_witness(1),
    "mamba2: Mamba-2, 2 groups": mamba2_witness(2),
    "gated_deltanet: Qwen3-Next": Witness(
        "Qwen3NextForCausalLM",
        {**LINEAR, **DELTA, "num_experts": 0},
        GATED_DELTANET,
        qwen3_next_weights,
        norm_offset=1.0,
    ),
    "gated_deltanet, negative eigenvalues: OLMo Hybrid": Witness(
        "OlmoHybridForCausalLM",
        {
            **LINEAR,
            **DELTA,
            "linear_allow_neg_eigval": True,
            "num_hidden_layers": LAYERS + 1,  # one must be attention, and is cut off
            "layer_types": ["linear_attention"] * LAYERS + ["full_attention"],
        },
        {**GATED_DELTANET, "negative_eigenvalues": True},
        olmo_hybrid_weights,
    ),
    "kda: Kimi Linear": Witness(
        "KimiLinearForCausalLM",
        {**LINEAR, "mlp_layer_types": ["dense"] * LAYERS, "linear_head_dim": 8, "linear_num_heads": 4},
        {"mixer": "kda", "n_heads": 4, "head_dim": 8},
        kimi_linear_weights,
        "self_attn",
    ),
}
