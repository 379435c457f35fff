import json
import math
import shutil

import numpy as np
import pytest
import torch

from ssm_trn.data.token_file import TokenFile
from ssm_trn.data.tokenizer import BOS_ID
from ssm_trn.evaluation.scoring import (
    BlockScores,
    bits_per_byte,
    paired_bootstrap,
    score_blocks,
    score_held_out,
    token_log_probabilities,
)
from tests.evaluation.models import BigramModel


def one_by_one(model, tokens, context_length) -> np.ndarray:
    """Each token by a forward pass over exactly what it may see: its window back to the start or its document's BOS."""
    scores = []
    for position in range(1, len(tokens)):
        first = (position - 1) // context_length * context_length
        seen = list(tokens[first:position])
        if BOS_ID in seen:
            seen = seen[len(seen) - 1 - seen[::-1].index(BOS_ID) :]
        logits, _ = model(torch.tensor([seen]))
        scores.append(logits[0, -1].double().log_softmax(0)[int(tokens[position])].item())
    return np.array(scores)


@pytest.mark.parametrize(("length", "context_length"), [(70, 16), (65, 16), (40, 64), (2, 5), (33, 1)])
@torch.inference_mode()
def test_each_token_is_scored_once_in_its_window(model, length, context_length):
    generator = np.random.default_rng(0)
    tokens = generator.integers(4, model.config.vocab_size, length).astype(np.uint16)
    tokens[[0, *(p for p in (9, 16, 31, 48) if p < length)]] = BOS_ID
    expected = one_by_one(model, tokens.tolist(), context_length)
    for batch_size in (1, 3, 16):
        scores = token_log_probabilities(model, tokens, context_length, batch_size)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def test_uniform_model_needs_log2_of_the_vocabulary_for_each_token(data, tokenizer):
    model = BigramModel(torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size))
    file = TokenFile.open(data, "validation")
    text_tokens = len(file.tokens) - 2 * file.documents
    blocks = score_held_out(model, tokenizer, data, context_length=64)
    assert blocks.bytes.sum() == file.text_bytes
    expected = text_tokens * math.log2(tokenizer.vocab_size) / file.text_bytes
    assert bits_per_byte(blocks).value == pytest.approx(expected, rel=1e-6)


def test_blocks_are_the_same_for_every_window(data, tokenizer):
    table = torch.randn(tokenizer.vocab_size, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    # A bigram model sees one token only, so the window can't change its scores: the blocks must be equal.
    short, long = (score_held_out(BigramModel(table), tokenizer, data, length) for length in (7, 500))
    np.testing.assert_array_equal(short.bytes, long.bytes)
    np.testing.assert_allclose(short.bits, long.bits, rtol=1e-6)


def test_blocks_sum_what_a_loop_sums():
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, 50, 2500)
    lengths = generator.integers(0, 6, 50)
    scores = -generator.random(2499)
    blocks = score_blocks(scores, tokens, lengths)
    for block in range(3):
        bits = size = 0
        for position in range(block * 1024, min(2499, (block + 1) * 1024)):
            if lengths[tokens[position + 1]]:
                bits -= scores[position] / math.log(2)
                size += lengths[tokens[position + 1]]
        assert blocks.bits[block] == pytest.approx(bits)
        assert blocks.bytes[block] == size
    assert len(blocks.bits) == 3


def random_blocks(count: int, seed: int = 0) -> BlockScores:
    generator = np.random.default_rng(seed)
    return BlockScores(generator.normal(8000, 800, count), np.full(count, 4000))


def test_interval_is_that_of_the_normal_approximation():
    blocks = random_blocks(400)
    estimate = bits_per_byte(blocks)
    assert estimate.value == pytest.approx(blocks.bits.sum() / blocks.bytes.sum())
    half = 1.96 * (blocks.bits / 4000).std() / math.sqrt(400)
    assert (estimate.value - estimate.low) / half == pytest.approx(1, abs=0.1)
    assert (estimate.high - estimate.value) / half == pytest.approx(1, abs=0.1)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        estimate = bits_per_byte(random_blocks(60, seed), resamples=500, seed=seed)
        covered += estimate.low <= 2.0 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


def test_paired_difference_is_sharper_than_the_values():
    first = random_blocks(200)
    noise = np.random.default_rng(1).normal(0, 20, 200)
    second = BlockScores(first.bits + 40 + noise, first.bytes)
    difference = paired_bootstrap(first, second)
    assert difference.value == pytest.approx(-0.01, abs=2e-3)
    assert difference.low < difference.value < difference.high < 0
    value = bits_per_byte(first)
    assert difference.high - difference.low < 0.1 * (value.high - value.low)
    reverse = paired_bootstrap(second, first)
    assert (reverse.value, reverse.low, reverse.high) == pytest.approx(
        (-difference.value, -difference.high, -difference.low)
    )


def test_bootstrap_is_seeded_and_equal_models_do_not_differ():
    blocks = random_blocks(50)
    assert bits_per_byte(blocks, seed=3) == bits_per_byte(blocks, seed=3) != bits_per_byte(blocks, seed=4)
    same = paired_bootstrap(blocks, blocks)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_wrong_input_is_told_in_a_sentence(data, tokenizer, tmp_path):
    model = BigramModel(torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size))
    with pytest.raises(ValueError, match="different blocks"):
        paired_bootstrap(random_blocks(5), random_blocks(6))
    with pytest.raises(ValueError, match="context_length 0"):
        token_log_probabilities(model, np.array([1, 5]), 0)
    with pytest.raises(ValueError, match="the text is empty"):
        score_blocks(np.empty(0), np.array([BOS_ID]), tokenizer.piece_bytes)
    with pytest.raises(FileNotFoundError):
        score_held_out(model, tokenizer, tmp_path, 8)
    other = type(tokenizer).train(["some other text " * 20], 290)
    with pytest.raises(ValueError, match="another tokenizer than the model"):
        score_held_out(model, other, data, 8)


def test_tokens_that_lost_text_are_noticed(data, tokenizer, tmp_path):
    folder = shutil.copytree(data, tmp_path / "copy")
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["validation"]["bytes"] += 1
    (folder / "meta.json").write_text(json.dumps(meta))
    model = BigramModel(torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size))
    with pytest.raises(ValueError, match="do not hold the whole text"):
        score_held_out(model, tokenizer, folder, 8)
