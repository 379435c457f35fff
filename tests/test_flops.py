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
    writes = 2 * D * (5 * D + 2 * 2) + 2 * D * D + 2 * 4 * 5 * D + 2 * 7 * 2 * 32 * 32
    assert flops({"mixer": "deltaproduct", "n_heads": 2, "feed_forward": "none"}, length) == HEAD + writes
    based = 2 * D * (2 * 2 * 4 + D) + 2 * D * D + 5 * 2 * (1 + 4 + 10) * (32 + 1)  # features, values and normaliser
    assert flops({"mixer": "based", "n_heads": 2, "head_dim": 4, "feed_forward": "none"}, length) == HEAD + based
    rg_lru = 2 * D * 2 * D + 2 * D * D + 2 * 4 * D + 2 * 2 * D * D / 4 + (7 + 3) * D  # gates are a quarter dense
    assert flops({"mixer": "rg_lru", "n_heads": 4, "feed_forward": "none"}, length) == HEAD + rg_lru


@pytest.mark.parametrize("length", [2, 65])
def test_rwkv_and_mamba3(length):
    shift = 2 * D * 5 * 4 * 2  # down and up again
    rwkv6 = shift + 2 * D * 8 * 2 + 2 * D * 5 * D + 5 * 2 * 32 * 32 + 2 * 2 * 32 * 32 / length  # the state, read apart
    layer = {"mixer": "rwkv6", "n_heads": 2, "shift_rank": 4, "decay_rank": 8, "feed_forward": "none"}
    assert flops(layer, length) == HEAD + rwkv6
    rwkv7 = 2 * D * 2 * (8 + 8 + 16) + 2 * D * 4 * D + 9 * 2 * 32 * 32
    layer = {"mixer": "rwkv7", "n_heads": 2, "rank": 8, "gate_rank": 16, "feed_forward": "none"}
    assert flops(layer, length) == HEAD + rwkv7
    width, state = 2 * D, 8
    mamba3 = 2 * D * (2 * width + 2 * state + 3 * 8 + 2) + 2 * width * D + 5 * state * width
    layer = {"mixer": "mamba3", "d_state": state, "head_dim": 16, "feed_forward": "none"}
    assert flops(layer, length) == HEAD + mamba3


@pytest.mark.parametrize("length", [2, 65])
def test_convolutions_and_mlstm(length):
    gated_out = 2 * D * 2 * D
    lru = 2 * D * 2 * 6 * 2 + (7 + 3) * 2 * 6 + gated_out  # each state is scanned twice, for both of its parts
    assert flops({"mixer": "lru", "d_state": 6, "feed_forward": "none"}, length) == HEAD + lru
    mlstm = 2 * D * (2 * 32 + 2 * D) + 2 * D * 2 * 2 + 2 * D * D + 5 * 2 * 16 * (32 + 1)
    assert flops({"mixer": "mlstm", "n_heads": 2, "feed_forward": "none"}, length) == HEAD + mlstm
    # Of two blocks with a later half, 64 and 128 steps: transforms of what is sent, of what is received, of the taps.
    far = {2: 0, 65: 3 * 2.5 * 64 * 6 + 6 * 33 + 3 * 2.5 * 128 * 7 + 6 * 65}[length] * D / length
    convolution = 2 * min(length, 32) * D + far
    split = {2: 1 * 2, 65: 8 * 9}[length] / length  # lags are counted in rows of so many, the last one filled up
    s4d = 2 * 2 * D * 8 * split + convolution + gated_out
    assert flops({"mixer": "s4d", "d_state": 8, "feed_forward": "none"}, length) == pytest.approx(HEAD + s4d)
    taps = 2 * 10 * (1 + 2 * 3) + 2 * 2 * 10 * 10 + 2 * 10 * D
    hyena = 2 * D * 3 * D + 2 * 3 * 3 * D + taps + convolution + 2 * D * D
    layer = {"mixer": "hyena", "filter_width": 10, "filter_bands": 3, "feed_forward": "none"}
    assert flops(layer, length) == pytest.approx(HEAD + hyena)


def test_layers_add_up_and_one_token_is_no_sequence():
    one, two = flops("mamba2", 10), ModelConfig(VOCAB, D, ["mamba2"] * 2).flops_per_token(10)
    assert two - one == one - HEAD
    with pytest.raises(ValueError, match="must be at least 2"):
        flops("mamba2", 1)
