"""Accuracy on held-out data whose batches say so: in `part`, bool [B, parts], each row has its one True."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ssm_trn.data.datamodule import IGNORED

_COUNTS = 4  # scored steps that are right, scored steps, rows that are all right, rows with a scored step


def accuracy_counts(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """float32 [4 parts]: what `accuracies` needs of a batch; [0] for batches without `part`.

    Sums over batches and processes may be made of it.
    """
    if "part" not in batch:
        return logits.new_zeros(0, dtype=torch.float32)
    scored = batch["targets"] != IGNORED  # [B, T]
    right = (logits.argmax(-1) == batch["targets"]) & scored
    counts = [right.sum(1), scored.sum(1), (right == scored).all(1) & scored.any(1), scored.any(1)]
    return (batch["part"].float().T @ torch.stack([count.float() for count in counts], 1)).flatten()


def accuracies(counts: Sequence[float], parts: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Names and values to log: `accuracy` and `sequence_accuracy`, the means over the parts, and of each part.

    Args:
        counts: sums of `accuracy_counts`, [4 parts].
        parts: their names.
    """
    for index, name in ((0, "accuracy"), (2, "sequence_accuracy")):
        values = [
            right / max(scored, 1)
            for right, scored in zip(counts[index::_COUNTS], counts[index + 1 :: _COUNTS], strict=True)
        ]
        yield name, sum(values) / len(values)
        if len(parts) > 1:
            yield from ((f"{name}/{part}", value) for part, value in zip(parts, values, strict=True))
