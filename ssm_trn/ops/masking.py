"""How masked steps (padding) are passed over: recurrences let the state through, convolutions delete the steps."""

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


def delete_masked(x: Tensor, reset: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Moves the real steps of each row to its front, in order; and says where each step went [B, T]."""
    order = torch.argsort(~mask, dim=1, stable=True)  # [B, T]
    x = x.masked_fill(~mask[..., None], 0).gather(1, order[..., None].expand_as(x))
    if reset is not None:
        reset = (reset & mask).gather(1, order)
    return x, reset, (mask.cumsum(1, dtype=torch.int64) - 1).clamp(min=0)
