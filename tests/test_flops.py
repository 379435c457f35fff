"""Operations counted on the module against the same sums by hand."""

import pytest

from ssm_trn import ModelConfig

VOCAB, D = 100, 64
FEED_FORWARD = 2 * 3 * D * 192  # 8/3 D, rounded up to a multiple of 32
HEAD = 2 * D * VOCAB


def flops(layer, length):
    return ModelConfig(VOCAB, D, [layer]).flops_per_token(length)


@pytest.mark.parametrize("length", [2, 7, 300])
def test_attention(length):
    projections = 2 * D * 3 * D + 2 * D * D
    layer = {"mixer": "attention", "n_heads": 4}
    seen = (length + 1) / 2  # steps that a step sees, on average
    assert flops(layer, length) == pytest.approx(HEAD + FEED_FORWARD + projections + 4 * D * seen)
    window = sum(min(t + 1, 5) for t in range(length)) / length
    assert flops({**layer, "window": 5}, length) == pytest.approx(HEAD + FEED_FORWARD + projections + 4 * D * window)


def test_grouped_heads_save_projections_alone():
    saved = flops({"mixer": "attention", "n_heads": 4}, 50) - flops(
        {"mixer": "attention", "n_heads": 4, "n_kv_heads": 2}, 50
    )
    assert saved == 2 * D * D


@pytest.mark.parametrize("length", [2, 65])
def test_recurrences_do_not_depend_on_the_length(length):
    width, state = 2 * D, 8
    convolved = width + 2 * state
    mamba2 = 2 * D * (width + convolved + 8) + 2 * width * D + 2 * 4 * convolved + 5 * state * width
    layer = {"mixer": "mamba2", "d_state": state, "head_dim": 16, "feed_forward": "none"}
    assert flops(layer, length) == HEAD + mamba2
    mamba = 2 * D * 2 * width + 2 * width * (4 + 2 * state) + 2 * 4 * width + 2 * width * D
    mamba += 2 * 4 * width + width * (7 * state + 3)
    assert flops({"mixer": "mamba", "d_state": state, "feed_forward": "none"}, length) == HEAD + mamba
    delta = 2 * D * (4 * D + 2 * 2) + 2 * D * D + 2 * 4 * 3 * D + 7 * 2 * 32 * 32
    assert flops({"mixer": "gated_deltanet", "n_heads": 2, "feed_forward": "none"}, length) == HEAD + delta


def test_layers_add_up_and_one_token_is_no_sequence():
    one, two = flops("mamba2", 10), ModelConfig(VOCAB, D, ["mamba2"] * 2).flops_per_token(10)
    assert two - one == one - HEAD
    with pytest.raises(ValueError, match="must be at least 2"):
        flops("mamba2", 1)
