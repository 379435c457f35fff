"""What surrounds the computation inside an op: its precision and its threads."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs loops of small operators on one thread.

    PyTorch would split each operator over the threads and wait for the slowest. On a free machine that gains little;
    where the cores are shared with other work it makes such a loop more than ten times slower.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def full_precision(device: torch.device) -> AbstractContextManager:
    """No autocast inside an op: it would round the state to bfloat16."""
    # The meta device, on which models are counted and planned, knows no autocast.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype) without the call where x has that dtype: a decode step is so short that these calls show."""
    return x if x.dtype == dtype else x.to(dtype)
