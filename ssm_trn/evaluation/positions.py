"""Loss by position: how much a model gains from what lies further back, and where it stops to gain."""

from pathlib import Path

import numpy as np
import torch

from ssm_trn.data.token_file import TokenFile
from ssm_trn.evaluation.scoring import log_probabilities


@torch.inference_mode()
def loss_by_position(
    model, data: str | Path, length: int, batch_size: int = 8, max_tokens: int = 2**17
) -> dict[str, list] | None:
    """Nats per token of a held-out text over the number of tokens before it.

    Each held-out document is cut into disjoint windows of `length` tokens, read from a fresh state; the rest that fills
    no window is left out. Positions are taken together by powers of two.

    Args:
        model: a LanguageModel.
        data: the prepared folder.
        length: tokens of a window; may be longer than those of the training.
        batch_size: windows at once.
        max_tokens: no more windows than these tokens fill, taken evenly over the text.

    Returns:
        {"positions", "nats", "tokens"}: for each group the number of tokens before the last one in it, the mean loss
        and how many tokens that is of; None where no document is as long as a window.
    """
    file = TokenFile.open(data, "validation")
    starts = [
        start
        for first, last in zip(file.offsets[:-1], file.offsets[1:], strict=True)
        for start in range(first, last - length, length)
    ]
    if not starts:
        return None
    starts = starts[:: -(-len(starts) * length // max_tokens)]
    device = next(model.parameters()).device
    has_text = torch.from_numpy(file.tokenizer.piece_bytes > 0).to(device)
    nats, counts = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
    for place in range(0, len(starts), batch_size):
        positions = np.array(starts[place : place + batch_size])[:, None] + np.arange(length + 1)  # [B, T + 1]
        tokens = torch.from_numpy(file.ids(positions).astype(np.int64)).to(device)
        targets = tokens[:, 1:]
        features, _ = model.features(tokens[:, :-1])
        scores, _ = log_probabilities(model, features.flatten(0, 1), targets.flatten())
        scored = has_text[targets]
        nats -= torch.where(scored, scores.view_as(targets), 0).double().sum(0).cpu()
        counts += scored.sum(0).cpu()
    groups = _powers_of_two(length)
    totals, tokens_of = (np.add.reduceat(x.numpy(), groups[:-1]) for x in (nats, counts))
    return {
        "positions": groups[1:].tolist(),
        "nats": (totals / np.maximum(tokens_of, 1)).tolist(),
        "tokens": tokens_of.tolist(),
    }


def _powers_of_two(length: int) -> np.ndarray:
    """0, 1, 2, 4, ... below `length`, and `length` itself."""
    powers = [0, *(2**power for power in range(length.bit_length()) if 2**power < length)]
    return np.array([*powers, length])
