"""Options that do not fit are refused in one sentence that names the mend."""

import pytest

from ssm_trn import mixers

WRONG = [
    ("attention", {"n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
    ("attention", {"n_heads": 4, "n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
    ("attention", {"head_dim": 7}, "head_dim 7 is odd"),
    ("attention", {"window": 0}, "window is 0; it must be positive"),
    ("attention", {"n_heads": 2, "rotary_fraction": 0.1}, "rotary_fraction 0.1 rotates 1 of 16 channels .* even"),
    ("attention", {"n_heads": 2, "rotary_fraction": 1.5}, "rotates 24 of 16 channels .* at most 1"),
    ("attention", {"n_heads": 2, "rotary_fraction": 0.05}, "rotates 0 of 16 channels .* above 0"),
    ("attention", {"qk_norm_across_heads": True}, "set qk_norm as well"),
    ("mamba", {"bcdt_norm_eps": 0.0}, "bcdt_norm_eps is 0.0; it must be positive"),
    ("mamba", {"conv_width": 0}, "conv_width is 0; it must be positive"),
    ("mamba2", {"head_dim": 48}, "expand \\* d_model = 64 is not divisible by head_dim 48"),
    ("mamba2", {"head_dim": 16, "n_groups": 3}, "the 4 heads .* do not divide into 3 groups"),
    ("mamba3", {"head_dim": 48}, "expand \\* d_model = 64 is not divisible by head_dim 48"),
    ("mamba3", {"head_dim": 16, "n_groups": 3}, "the 4 heads .* do not divide into 3 groups"),
    ("mamba3", {"rotary_fraction": 1.5}, "rotary_fraction 1.5 turns 96 pairs of the 128 rows .* at most 1"),
    ("mamba3", {"d_state": 3, "rotary_fraction": 0.5}, "rotary_fraction 0.5 turns 0 pairs of the 3 rows .* one pair"),
    ("rwkv6", {"shift_rank": 0}, "shift_rank is 0; it must be positive"),
    ("rwkv6", {"depth": 2.0}, "depth is 2.0; it must be between 0, the first layer, and 1, the last"),
    ("rwkv7", {"depth": -0.5}, "depth is -0.5; it must be between 0"),
    ("rwkv7", {"n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
    ("retnet", {"head_dim": 7}, "head_dim 7 is odd"),
    ("gla", {"n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
    ("gla", {"gate_temperature": 0.0}, "gate_temperature is 0.0; it must be positive"),
    ("deltanet", {"n_heads": 4, "n_key_heads": 3}, "n_heads 4 is not a multiple of n_key_heads 3"),
    ("gated_deltanet", {"n_heads": -1}, "n_heads is -1; it must be positive"),
    ("kda", {"n_heads": 3}, "d_model 32 is not divisible by n_heads 3"),
    ("linear_attention", {"value_head_dim": 0}, "value_head_dim is 0; it must be positive"),
    ("based", {"head_dim": 0}, "head_dim is 0; it must be positive"),
    ("based", {"n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
    ("hgrn2", {"lower_bound": 1.0}, "lower_bound is 1.0; it must be at least 0 and below 1"),
    ("deltaproduct", {"n_writes": 0}, "n_writes is 0; it must be positive"),
    ("gated_deltaproduct", {"n_heads": 4, "n_key_heads": 3}, "n_heads 4 is not a multiple of n_key_heads 3"),
    ("rg_lru", {"conv_width": 0}, "conv_width is 0; it must be positive"),
    ("lru", {"r_min": 0.9, "r_max": 0.5}, "r_min 0.9 and r_max 0.5 are no ring .* 0 <= r_min < r_max <= 1"),
    ("lru", {"r_max": 1.1}, "r_max 1.1 are no ring"),
    ("lru", {"d_state": 0}, "d_state is 0; it must be positive"),
    ("s4d", {"d_state": 7}, "d_state 7 is odd: complex states come in pairs, or choose init: real"),
    ("s4d", {"init": "legs"}, "unknown init 'legs': choose one of lin, inv, real"),
    ("hyena", {"context_length": 0}, "context_length is 0; it must be positive"),
    ("mlstm", {"gate_soft_cap": 0.0}, "gate_soft_cap is 0.0; it must be positive"),
    ("mlstm", {"n_heads": 3}, "d_model 32 is not divisible by n_heads 3"),
]


@pytest.mark.parametrize("name, options, message", WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        mixers.get(name)(32, **options)


def test_a_name_is_taken_once_and_unknown_ones_are_told_what_there_is():
    with pytest.raises(ValueError, match="there is a mixer 'mamba' already"):
        mixers.register("mamba")(mixers.get("mamba2"))
    with pytest.raises(ValueError, match="unknown mixer 'mambo': choose one of attention, .*, mamba, mamba2"):
        mixers.get("mambo")
