"""Documents of several lengths in one row: resets from the offsets of other libraries, and where the last one was."""

import torch
from torch import Tensor


def resets_from(cu_seqlens: Tensor, length: int | None = None) -> Tensor:
    """Where documents begin that are packed one after another.

    Args:
        cu_seqlens: integers [N + 1], the offsets of N documents: 0, the end of the first, ..., the end of the last.
            An empty document leaves no trace.
        length: number of steps of the packed row, if the last offset is to be checked against it.

    Returns:
        reset, bool [1, T], True at the first step of each document. An op takes it with inputs of one row, [1, T, ...].

    Raises:
        ValueError: if the offsets are not integers that rise from 0 to `length`.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        shape = list(cu_seqlens.shape)
        raise ValueError(f"cu_seqlens must be integers [documents + 1], got {cu_seqlens.dtype} of shape {shape}")
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start with 0, got {offsets[0]}")
    if offsets != sorted(offsets):
        raise ValueError("cu_seqlens must not decrease: each offset is where a document ends")
    total = offsets[-1]
    if total == 0 or (length is not None and total != length):
        expected = "be at least 1" if length is None else f"be the length of the row, {length}"
        raise ValueError(f"the last of cu_seqlens must {expected}, got {total}")
    reset = torch.zeros(1, total, dtype=torch.bool, device=cu_seqlens.device)
    reset[0, [start for start in offsets[:-1] if start < total]] = True
    return reset


def at_last_reset(reset: Tensor, x: Tensor, otherwise: int) -> Tensor:
    """x [B, T] at the last reset so far, `otherwise` before the first; both may only rise over time.

    It is a running maximum, made of ordinary operators (XLA has no cummax of int64).
    """
    latest, span = torch.where(reset, x, otherwise), 1
    while span < latest.shape[1]:
        latest = torch.cat([latest[:, :span], torch.maximum(latest[:, span:], latest[:, :-span])], 1)
        span *= 2
    return latest
