"""How a mixer makes the recurrence pass over masked steps (padding)."""

import torch
from torch import Tensor


def pass_through(mask: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors with their masked steps set to 0; unchanged where `mask` is None.

    A step whose key, write strength, step size dt or log decay is 0 neither decays nor writes the state, and a masked
    step must not reset it. The content of a masked step, NaN included, reaches neither a result nor a gradient.

    Args:
        mask: bool [B, T], True at real tokens.
        tensors: each [B, T, ...], of any dtype; None stays None.

    Raises:
        ValueError: if the mask is not bool, or if a tensor does not start with the shape of the mask.
    """
    if mask is None:
        return tensors
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask must be a bool tensor [batch, time], got {mask.dtype} of shape {list(mask.shape)}")
    for tensor in tensors:
        if tensor is not None and tensor.shape[:2] != mask.shape:
            raise ValueError(f"mask {list(mask.shape)} must match the first two sizes of {list(tensor.shape)}")
    padding = ~mask
    return tuple(
        t if t is None else t.masked_fill(padding.reshape(*mask.shape, *(1,) * (t.dim() - 2)), 0) for t in tensors
    )
