"""Tiny models of transformers with random weights, one for each format that transformers has."""

import torch

VOCABULARY = 48
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
TRANSFORMER = {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MIXED = {**TRANSFORMER, **DELTA, "layer_types": ["linear_attention", "full_attention"]}
KIMI = {
    **TRANSFORMER,
    "layer_types": ["linear_attention"] * 2,
    "mlp_layer_types": ["dense"] * 2,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}

# name of the test: format, class of transformers, options beside SIZE
CASES = {
    "mamba": ("mamba", "MambaForCausalLM", {"state_size": 4, "time_step_rank": 3}),
    "mamba, own head": ("mamba", "MambaForCausalLM", {"conv_kernel": 3, "tie_word_embeddings": False}),
    "mamba2": ("mamba2", "Mamba2ForCausalLM", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2}),
    "mamba2, tied": (
        "mamba2",
        "Mamba2ForCausalLM",
        {
            "state_size": 4,
            "num_heads": 12,
            "head_dim": 8,
            "n_groups": 1,
            "expand": 3,
            "layer_norm_epsilon": 1e-2,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_mamba": ("falcon_mamba", "FalconMambaForCausalLM", {"state_size": 4, "mixer_rms_eps": 1e-2}),
    "llama": ("llama", "LlamaForCausalLM", {**TRANSFORMER, "rms_norm_eps": 1e-2}),
    "llama, biases": (
        "llama",
        "LlamaForCausalLM",
        {
            **TRANSFORMER,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        {**TRANSFORMER, "num_hidden_layers": 4, "attention_window_size": 7, "logits_soft_cap": 2.0},
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**MIXED, "num_experts": 0, "head_dim": 16, "rms_norm_eps": 1e-2},
    ),
    "qwen3_next, biases": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {
            **MIXED,
            "num_experts": 4,
            "mlp_only_layers": [0, 1],
            "attention_bias": True,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridForCausalLM", {**MIXED, "rms_norm_eps": 1e-2}),
    "olmo_hybrid, no positions": (
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        {
            **MIXED,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "kimi_linear": ("kimi_linear", "KimiLinearForCausalLM", {**KIMI, "rms_norm_eps": 1e-2}),
}


def theirs_of(transformers, case: str):
    """The model of a case in evaluation mode, its weights large enough that each of them shows in the logits."""
    _, name, options = CASES[case]
    model = getattr(transformers, name)
    torch.manual_seed(0)
    model = model(model.config_class(**{**SIZE, **options})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter_name.endswith("A_log"):
                parameter += 0.2 * torch.randn_like(parameter)
            elif "embed" in parameter_name:  # small, else a tied model says the last token again and again
                parameter.copy_(0.05 * torch.randn_like(parameter))
            else:
                parameter.copy_(2 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def logits_of(theirs, tokens: torch.Tensor, cache=None, past: int = 0):
    """Their logits [B, T, vocabulary], and their cache."""
    positions = past + torch.arange(tokens.shape[1]).expand_as(tokens)
    # A model of transformers without attention layers cannot make their masks itself.
    kimi = "Kimi" in type(theirs).__name__
    mask = {"full_attention": None, "linear_attention": None} if kimi else None
    options = {} if "Mamba" in type(theirs).__name__ else {"position_ids": positions}
    out = theirs(tokens, attention_mask=mask, cache=cache, use_cache=True, **options)
    return out.logits, out.get("cache")
