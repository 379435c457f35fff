"""Threads inside an op."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
