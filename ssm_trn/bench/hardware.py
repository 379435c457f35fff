"""The device under test: what it can do at most, its memory, and the energy it takes."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ssm_trn.accelerators.devices import memory, synchronize

_PRODUCT_WIDTH = {"cpu": 2048}  # of square matrices; other devices need larger ones to be busy
_COPIED_BYTES = {"cpu": 2**28}  # several times what a cache holds
_POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Lap:
    """What happened since the last one: seconds, and joules where there is a meter."""

    seconds: float
    joules: float | None


class Stopwatch:
    """Time and energy between laps; each lap waits until the device has done what it was told."""

    def __init__(self, device: torch.device, meter: "EnergyMeter | None" = None):
        self._device, self._meter = device, meter
        self._last = self._now()

    def lap(self) -> Lap:
        (before, energy_before), (now, energy) = self._last, self._now()
        self._last = now, energy
        return Lap(now - before, None if self._meter is None else self._meter.joules(energy_before, energy))

    def _now(self) -> tuple[float, list[float]]:
        synchronize(self._device)
        return time.perf_counter(), [] if self._meter is None else self._meter.read()


class EnergyMeter:
    """Counters of energy that only grow, each until it starts again at 0.

    Args:
        read: the counters in joules.
        ranges: where each of them starts again.
    """

    def __init__(self, read: Callable[[], list[float]], ranges: Sequence[float]):
        self.read, self._ranges = read, ranges

    def joules(self, before: Sequence[float], after: Sequence[float]) -> float:
        return sum((b - a) % size for a, b, size in zip(before, after, self._ranges, strict=True))


def energy_meter(device: torch.device, powercap: Path = _POWERCAP) -> EnergyMeter | None:
    """The meter of a GPU (NVML) or of the processor's packages (RAPL); None where there is none that one may read.

    A processor's meter counts all that it does, not this process alone.
    """
    if device.type == "cuda":
        return _gpu_meter(device)
    if device.type != "cpu":
        return None
    counters = [zone / "energy_uj" for zone in sorted(powercap.glob("intel-rapl:[0-9]"))]
    if not counters or not all(os.access(counter, os.R_OK) for counter in counters):
        return None
    sizes = [int((counter.parent / "max_energy_range_uj").read_text()) / 1e6 for counter in counters]
    return EnergyMeter(lambda: [int(counter.read_text()) / 1e6 for counter in counters], sizes)


def _gpu_meter(device: torch.device) -> EnergyMeter | None:
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    try:
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:  # older than Volta
        return None
    return EnergyMeter(lambda: [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3], [2**64 / 1e3])


def product_speed(device: torch.device, dtype: torch.dtype, rounds: int = 5) -> float:
    """Floating-point operations per second of the fastest of some products of large square matrices."""
    width = _PRODUCT_WIDTH.get(device.type, 8192)
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    return 2 * width**3 / _fastest(lambda: a @ b, device, rounds)


def copy_speed(device: torch.device, rounds: int = 5) -> float:
    """Bytes per second, read and written together, of the fastest of some copies of a large block of memory."""
    size = _COPIED_BYTES.get(device.type, 2**30)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source), device, rounds)


@torch.no_grad()
def _fastest(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    call()
    watch = Stopwatch(device)
    seconds = []
    for _ in range(rounds):
        watch.lap()
        call()
        seconds.append(watch.lap().seconds)
    return min(seconds)


def memory_size(device: torch.device) -> int | None:
    """Bytes of memory of the device; None where it does not tell."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return memory(device).size


def device_name(device: torch.device, processor: str) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor if device.type == "cpu" else device.type
