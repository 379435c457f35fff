"""What the kernels can do: `supports` says it before one is called, and names the limit in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Answer", "supports"]

TYPES = ("float32", "bfloat16")  # of activations; decays, step sizes, write strengths and states are float32

# What each kernel bounds: the argument, its axis, what that axis is called, the largest size.
LARGEST: dict[str, tuple[tuple[str, int, str, int], ...]] = {
    "linear_attention": (("k", 3, "key channels", 128), ("v", 3, "value channels", 512)),
    "delta_rule": (("k", 3, "key channels", 128), ("v", 3, "value channels", 128)),
    "selective_scan": (("A", 0, "channels", 8192), ("A", 1, "states for each channel", 64)),
    "short_conv": (("weight", 1, "taps", 32),),
}


@dataclass(frozen=True)
class Answer:
    """True where a kernel can do what was asked; else `limit` is the sentence that says why not."""

    limit: str | None = None

    def __bool__(self) -> bool:
        return self.limit is None


def supports(kernel: str, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, object]) -> Answer:
    """Whether a kernel, forward and backward, can do these sizes and types.

    Args:
        kernel: "linear_attention", "delta_rule", "selective_scan" or "short_conv".
        shapes: of its array arguments, by the names that the forward kernel gives them.
        dtypes: "float32", "bfloat16", ... of its activations, or those types of NumPy or torch, by the same names.

    Raises:
        ValueError: for another kernel, or without the shape of an argument that has a limit.
    """
    if kernel not in LARGEST:
        raise ValueError(f"There is no kernel {kernel!r}; there are {', '.join(LARGEST)}.")
    for argument, axis, what, largest in LARGEST[kernel]:
        if argument not in shapes:
            raise ValueError(f"The limits of {kernel} are of {argument} too: give its shape.")
        size = shapes[argument][axis]
        if size > largest:
            return Answer(f"the kernel of {kernel} has at most {largest} {what}, not {size}")
    dtypes = {argument: str(dtype).removeprefix("torch.") for argument, dtype in dtypes.items()}
    for argument, dtype in dtypes.items():
        if dtype not in TYPES:
            return Answer(f"the kernel of {kernel} takes {' and '.join(TYPES)}, and {argument} is {dtype}")
    if len(set(dtypes.values())) > 1:
        named = ", ".join(f"{argument} {dtype}" for argument, dtype in dtypes.items())
        return Answer(f"the kernel of {kernel} takes activations of one type, not {named}")
    return Answer()
