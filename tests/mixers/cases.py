"""Every mixer in a small size, with the options that change its mathematics. A new mixer gets a line here."""

import torch

from ssm_trn import mixers
from ssm_trn.layers import Float32Parameters

D_MODEL = 32

CASES = {
    "attention": {"mixer": "attention", "n_heads": 4, "n_kv_heads": 2},
    "attention-window": {"mixer": "attention", "n_heads": 2, "window": 5, "qk_norm": True},
    "attention-no-positions": {"mixer": "attention", "n_heads": 2, "rope_theta": None},
    "attention-gated": {
        "mixer": "attention",
        "n_heads": 2,
        "rotary_fraction": 0.5,
        "output_gate": True,
        "qkv_bias": True,
        "out_bias": True,
    },
    "attention-norm-across": {
        "mixer": "attention",
        "n_heads": 4,
        "n_kv_heads": 2,
        "qk_norm": True,
        "qk_norm_across_heads": True,
    },
    "mamba": {"mixer": "mamba", "d_state": 4},
    "mamba-normed": {"mixer": "mamba", "d_state": 4, "bcdt_norm_eps": 1e-3},
    "mamba-negative": {"mixer": "mamba", "d_state": 4, "negative_eigenvalues": True},
    "mamba2": {"mixer": "mamba2", "d_state": 8, "head_dim": 16},
    "mamba2-groups": {"mixer": "mamba2", "d_state": 8, "head_dim": 8, "n_groups": 2, "norm_before_gate": True},
    "mamba2-negative": {"mixer": "mamba2", "d_state": 8, "head_dim": 16, "negative_eigenvalues": True},
    "retnet": {"mixer": "retnet", "n_heads": 2, "head_dim": 8},
    "gla": {"mixer": "gla", "n_heads": 2, "gate_rank": 4, "gate_temperature": 2.0},
    "deltanet": {"mixer": "deltanet", "n_heads": 2, "value_head_dim": 8},
    "deltanet-negative": {"mixer": "deltanet", "n_heads": 2, "negative_eigenvalues": True},
    "gated_deltanet": {"mixer": "gated_deltanet", "n_heads": 2},
    "gated_deltanet-negative": {
        "mixer": "gated_deltanet",
        "n_heads": 4,
        "n_key_heads": 2,
        "negative_eigenvalues": True,
    },
    "kda": {"mixer": "kda", "n_heads": 4, "head_dim": 4},
    "kda-negative": {"mixer": "kda", "n_heads": 2, "n_key_heads": 1, "value_head_dim": 8, "negative_eigenvalues": True},
    "linear_attention": {"mixer": "linear_attention", "n_heads": 4, "value_head_dim": 6},
    "based": {"mixer": "based", "n_heads": 2, "head_dim": 3},
    "hgrn2": {"mixer": "hgrn2", "n_heads": 4},
    "hgrn2-bounded": {"mixer": "hgrn2", "n_heads": 2, "lower_bound": 0.75},
    "deltaproduct": {"mixer": "deltaproduct", "n_heads": 2},
    "deltaproduct-positive": {
        "mixer": "deltaproduct",
        "n_writes": 3,
        "n_heads": 4,
        "n_key_heads": 2,
        "value_head_dim": 6,
        "negative_eigenvalues": False,
    },
    "gated_deltaproduct": {"mixer": "gated_deltaproduct", "n_writes": 3, "n_heads": 2, "head_dim": 8},
    "rg_lru": {"mixer": "rg_lru", "n_heads": 4},
    "rg_lru-wide": {"mixer": "rg_lru", "n_heads": 2, "head_dim": 24, "conv_width": 3},
    "rwkv6": {"mixer": "rwkv6", "n_heads": 4, "shift_rank": 4, "decay_rank": 4},
    "rwkv7": {"mixer": "rwkv7", "n_heads": 2, "head_dim": 8, "rank": 4, "gate_rank": 6},
    "mamba3": {"mixer": "mamba3", "d_state": 8, "head_dim": 16},
    "mamba3-groups": {"mixer": "mamba3", "d_state": 6, "head_dim": 8, "n_groups": 2, "rotary_fraction": 1.0},
    "mlstm": {"mixer": "mlstm", "n_heads": 2},
    "mlstm-uncapped": {"mixer": "mlstm", "n_heads": 4, "head_dim": 6, "gate_soft_cap": None},
    "lru": {"mixer": "lru", "d_state": 12, "r_min": 0.5, "max_phase": 2.0},
    "s4d": {"mixer": "s4d", "d_state": 8},
    "s4d-inv": {"mixer": "s4d", "d_state": 6, "init": "inv"},
    "s4d-real": {"mixer": "s4d", "d_state": 3, "init": "real"},
    "hyena": {"mixer": "hyena", "context_length": 100, "filter_width": 8, "filter_bands": 3},
}


def make(case: str, dtype=torch.float64, d_model: int = D_MODEL):
    """The mixer of a case with weights large enough that every path through it matters."""
    options = dict(CASES[case])
    torch.manual_seed(0)
    mixer = mixers.get(options.pop("mixer"))(d_model, **options).to(dtype)
    for module in mixer.modules():
        if isinstance(module, Float32Parameters):
            module.reset_parameters()
    for module in mixer.modules():  # after the mixer, which may start some of them at 0
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
    if case.startswith("mlstm"):
        mixer.gate_bias.data.normal_()  # its input gates start closed
    return mixer


def activations(batch: int, length: int, seed: int = 1, dtype=torch.float64, d_model: int = D_MODEL):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, d_model, generator=generator, dtype=torch.float64).to(dtype)
