"""Options that do not fit are refused in one sentence that names the mend."""

import pytest

from ssm_trn import mixers

WRONG = [
    ("attention", {"n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
    ("attention", {"n_heads": 4, "n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
    ("attention", {"head_dim": 7}, "head_dim 7 is odd"),
    ("attention", {"window": 0}, "window is 0; it must be positive"),
    ("mamba", {"conv_width": 0}, "conv_width is 0; it must be positive"),
    ("mamba2", {"head_dim": 48}, "expand \\* d_model = 64 is not divisible by head_dim 48"),
    ("mamba2", {"head_dim": 16, "n_groups": 3}, "the 4 heads .* do not divide into 3 groups"),
    ("retnet", {"head_dim": 7}, "head_dim 7 is odd"),
    ("gla", {"n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
    ("gla", {"gate_temperature": 0.0}, "gate_temperature is 0.0; it must be positive"),
    ("deltanet", {"n_heads": 4, "n_key_heads": 3}, "n_heads 4 is not a multiple of n_key_heads 3"),
    ("gated_deltanet", {"n_heads": -1}, "n_heads is -1; it must be positive"),
    ("kda", {"n_heads": 3}, "d_model 32 is not divisible by n_heads 3"),
]


@pytest.mark.parametrize("name, options, message", WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        mixers.get(name)(32, **options)


def test_a_name_is_taken_once_and_unknown_ones_are_told_what_there_is():
    with pytest.raises(ValueError, match="there is a mixer 'mamba' already"):
        mixers.register("mamba")(mixers.get("mamba2"))
    with pytest.raises(ValueError, match="unknown mixer 'mamba3': choose one of attention, .*, mamba, mamba2"):
        mixers.get("mamba3")
