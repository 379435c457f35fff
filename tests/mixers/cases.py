"""Every mixer in a small size, with the options that change its mathematics. A new mixer gets a line here."""

import torch

from ssm_trn import mixers
from ssm_trn.layers import Float32Parameters

D_MODEL = 32

CASES = {
    "attention": {"mixer": "attention", "n_heads": 4, "n_kv_heads": 2},
    "attention-window": {"mixer": "attention", "n_heads": 2, "window": 5, "qk_norm": True},
    "attention-no-positions": {"mixer": "attention", "n_heads": 2, "rope_theta": None},
    "mamba": {"mixer": "mamba", "d_state": 4},
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
}


def make(case: str, dtype=torch.float64, d_model: int = D_MODEL):
    """The mixer of a case with weights large enough that every path through it matters."""
    options = dict(CASES[case])
    torch.manual_seed(0)
    mixer = mixers.get(options.pop("mixer"))(d_model, **options).to(dtype)
    for module in mixer.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for module in mixer.modules():
        if isinstance(module, Float32Parameters):
            module.reset_parameters()
    return mixer


def activations(batch: int, length: int, seed: int = 1, dtype=torch.float64, d_model: int = D_MODEL):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, d_model, generator=generator, dtype=torch.float64).to(dtype)
