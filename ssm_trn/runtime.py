"""What a process must set up once before it computes: the memory allocator, the threads, the device."""

import ctypes
import logging
import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def yield_idle_threads() -> None:
    """Lets OpenMP threads sleep while they wait; to be called before torch is imported.

    By default they spin. On a machine that does other work besides, a step of many small operators then takes more than
    twice as long; on a free one the difference is small. A value that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def tune_malloc() -> bool:
    """Keeps freed memory in the process on glibc, and says whether it could.

    By default glibc maps every block over 32 MB anew and gives it back when freed, so each large temporary pays for
    page faults again: a factor of 3 for the element-wise chains of these models on a CPU. Other C libraries are left
    as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    results = (mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1), mallopt(_M_TOP_PAD, 64 * 2**20))
    return all(results)


def set_up_process() -> None:
    """What every command does before it computes: `tune_malloc` and a fixed number of threads."""
    import torch

    tune_malloc()
    # Until a program has said how many threads it wants, MKL chooses anew for each product, and a sum over two threads
    # rounds otherwise than one over a single thread: a run would depend on what ran before it in the process.
    torch.set_num_threads(torch.get_num_threads())


def available_device(device: "str | torch.device | None" = None) -> "torch.device":
    """The device of that name; by default a GPU where there is one. In place of a GPU that is not there, the CPU.

    Raises:
        ValueError: if there is no such device.
    """
    import torch

    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"'{device}' names no device: choose cpu, or a GPU such as cuda:0") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        logger.warning("there is no %s on this machine: going on with the CPU", wanted)
        return torch.device("cpu")
    try:
        torch.empty(1, device=wanted).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"there is no device '{device}' on this machine that works ({reason}): choose cpu, or a GPU it has"
        ) from error
    return wanted
