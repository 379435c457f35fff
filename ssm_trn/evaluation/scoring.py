"""Log-probabilities of tokens, bits per byte of a held-out text, and how sure of them one can be.

    bits per byte = sum over tokens of -log2 p(token | what its window holds before it)  /  bytes of the text in UTF-8

The sum runs over the tokens of the text itself: neither the BOS nor the EOS of a document counts. As the tokenizer is
lossless, models with different vocabularies are comparable. Intervals come from the bootstrap over blocks of 1,024
tokens (Efron and Tibshirani 1993, chapter 13; for two models on the same text, paired: Koehn 2004), as a held-out part
has too few documents to resample those.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssm_trn.data.token_file import TokenFile
from ssm_trn.data.tokenizer import BOS_ID, Tokenizer
from ssm_trn.layers import widened

BLOCK_LENGTH = 1024
_ROWS_AT_ONCE = 2048  # of logits: 256 MiB in float32 at a vocabulary of 32,768


@dataclass(frozen=True)
class BlockScores:
    """What a model needed for each block of a text: bits float64 [N] for bytes int64 [N]."""

    bits: np.ndarray
    bytes: np.ndarray

    @classmethod
    def from_dict(cls, values: dict[str, list]) -> "BlockScores":
        return cls(np.array(values["bits"]), np.array(values["bytes"]))

    def to_dict(self) -> dict[str, list]:
        return {"bits": self.bits.tolist(), "bytes": self.bytes.tolist()}


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def log_probabilities(model, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How likely a model finds given next tokens.

    Args:
        model: a LanguageModel.
        features: [N, d_model], of `model.features`.
        targets: int64 [N], the token after each.

    Returns:
        Natural log-probabilities [N] in float32 or wider, and bool [N]: whether the target is the likeliest token.
    """
    scores, likeliest = [], []
    for part, target in zip(features.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True):
        logits = widened(model.logits(part))  # [n, V]
        scores.append(logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1))
        likeliest.append(logits.argmax(1) == target)
    return torch.cat(scores), torch.cat(likeliest)


@torch.inference_mode()
def token_log_probabilities(model, tokens: np.ndarray, context_length: int, batch_size: int = 16) -> np.ndarray:
    """Scores each token of a text once.

    The text is cut into disjoint windows of `context_length` steps, as in training: the state is fresh at the start of
    a window and at each BOS, and the first token that a window predicts is seen with one token of context.

    Args:
        model: a LanguageModel.
        tokens: integers [N], documents one after the other, each with its BOS (a memory map is read piece by piece).
        context_length: steps of a window.
        batch_size: windows at once; the result does not depend on it.

    Returns:
        float64 [N - 1]: the natural log-probability of tokens[1:].
    """
    if context_length < 1 or batch_size < 1:
        raise ValueError(f"context_length {context_length} and batch_size {batch_size} must be at least 1")
    device = next(model.parameters()).device
    scores = [np.empty(0)]
    start, last = 0, len(tokens) - 1
    while start < last:
        length = min(context_length, last - start)  # the last window may be shorter
        count = length * min(batch_size, (last - start) // length)
        piece = torch.from_numpy(tokens[start : start + count + 1].astype(np.int64)).to(device)
        inputs = piece[:-1].view(-1, length)
        features, _ = model.features(inputs, reset=inputs == BOS_ID)  # [B, T, d_model]
        score, _ = log_probabilities(model, features.flatten(0, 1), piece[1:])
        scores.append(score.double().cpu().numpy())
        start += count
    return np.concatenate(scores)


def score_blocks(log_probabilities: np.ndarray, tokens: np.ndarray, piece_bytes: np.ndarray) -> BlockScores:
    """Sums of bits and bytes for each block of 1,024 tokens, whatever the window they were scored in.

    Args:
        log_probabilities: [N - 1], of `token_log_probabilities`.
        tokens: integers [N].
        piece_bytes: int [vocabulary], the bytes of text that a token stands for; those of none (BOS, EOS) do not count.
    """
    lengths = piece_bytes[tokens[1:]]
    if not lengths.sum():
        raise ValueError("there is no token to score: the text is empty")
    bits = np.where(lengths > 0, log_probabilities / -math.log(2), 0.0)
    starts = np.arange(0, len(lengths), BLOCK_LENGTH)
    return BlockScores(np.add.reduceat(bits, starts), np.add.reduceat(lengths, starts))


def score_held_out(
    model, tokenizer: Tokenizer, data: str | Path, context_length: int, batch_size: int = 16
) -> BlockScores:
    """Scores the held-out text of a prepared data folder.

    Raises:
        FileNotFoundError: if there is no prepared data in the folder.
        ValueError: if its tokenizer is not the model's, or its tokens do not hold all of its text.
    """
    file = TokenFile.open(data, "validation")
    if file.tokenizer.hash != tokenizer.hash:
        raise ValueError(f"{data} has another tokenizer than the model: name the data that the model was trained on")
    tokens = file.ids(slice(None))
    if tokenizer.piece_bytes[tokens].sum() != file.text_bytes:
        raise ValueError(f"the held-out tokens of {data} do not hold the whole text: prepare the folder again")
    scores = token_log_probabilities(model, tokens, context_length, batch_size)
    return score_blocks(scores, tokens, tokenizer.piece_bytes)


def bits_per_byte(blocks: BlockScores, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Bits per byte with its bootstrap interval over blocks."""
    bits, lengths = _bootstrap_sums(np.stack([blocks.bits, blocks.bytes]), resamples, seed)
    return _estimate(blocks.bits.sum() / blocks.bytes.sum(), bits / lengths)


def paired_bootstrap(first: BlockScores, second: BlockScores, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The difference in bits per byte of two models on the same blocks, first - second: below 0, the first is better.

    Both models are resampled together, so that the difficulty that a block has for both cancels: the interval is far
    narrower than those of the two values.

    Raises:
        ValueError: if the blocks are not those of one text.
    """
    if not np.array_equal(first.bytes, second.bytes):
        raise ValueError("the two models were scored on different blocks: score both on one text with one tokenizer")
    difference = first.bits - second.bits
    bits, lengths = _bootstrap_sums(np.stack([difference, first.bytes]), resamples, seed)
    return _estimate(difference.sum() / first.bytes.sum(), bits / lengths)


def _bootstrap_sums(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Sums [K, resamples] of values [K, N], each over N blocks drawn with replacement."""
    generator, blocks = np.random.default_rng(seed), values.shape[1]
    at_once = max(1, 2**20 // blocks)
    sums = [
        values[:, generator.integers(blocks, size=(min(at_once, resamples - done), blocks))].sum(2)
        for done in range(0, resamples, at_once)
    ]
    return np.concatenate(sums, 1)


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))
