"""A NumPy stand-in for AWS's Neuron Kernel Interface (NKI): it runs kernels unchanged, on a CPU, and costs them.

    from ssm_nki.sdk import nisa, nki, nl          # the real SDK where it is installed, else this simulator

    @nki.jit
    def double(x):                                 # x: float32 [128, N] in HBM
        tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=y, src=tile)
        return y

    double(array)                                  # NumPy in, NumPy out, by the rules of gen2 (trn1)
    machine = Machine("gen3")                      # or by those of trn2
    machine.run(double, array)
    machine.trace                                  # every instruction, for ssm_nki.cycles

Instructions run one after another and exactly as written; nothing is scheduled. What the machine forbids is a
`KernelError` that names the instruction, the operand and the rule; what the simulator does not have is an
`UnsupportedError`. `as_nki()` provides the modules to kernels that say `import nki`.

The parts: `generations` (the rules that differ, as a table), `memory` (tensors and views), `operands` (rules that all
instructions share), `engines/` (the instructions, an engine a file), `trace`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ssm_nki.simulator import isa, language
from ssm_nki.simulator.errors import KernelError, UnsupportedError
from ssm_nki.simulator.machine import Machine, is_running

__all__ = ["Kernel", "KernelError", "Machine", "UnsupportedError", "as_nki", "isa", "jit", "language"]


class Kernel:
    """A function decorated with `jit`: call it with arrays, or give it to `Machine.run`.

    portable: it keeps to views of tensors that every release from NKI 0.2.0 on can do.
    """

    def __init__(self, function: Callable, portable: bool) -> None:
        self.function, self.portable = function, portable
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, function.__module__

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if is_running():  # another kernel calls it: a part of that one
            return self.function(*arguments, **keywords)
        return Machine().run(self, *arguments, **keywords)

    def __getitem__(self, programs: Any) -> Kernel:
        if programs not in (1, (1,)):
            raise UnsupportedError(f"The simulator runs one program of a kernel, not {programs}.")
        return self


def jit(function: Callable) -> Kernel:
    """What kernels see as `nki.jit`."""
    return Kernel(function, portable=True)


def _jit_of_others(function: Callable) -> Kernel:
    return Kernel(function, portable=False)


@contextmanager
def as_nki() -> Iterator[None]:
    """Within this context `import nki`, `import nki.language` and `import nki.isa` find the simulator.

    Import a kernel that was written for the real SDK in it; the kernel can be run outside as well. It may be written
    for a later release than 0.2.0: its views are those of 0.6.0.
    """
    module = ModuleType("nki")
    module.__dict__.update(jit=_jit_of_others, language=language, isa=isa, __path__=[])
    replaced = {name: sys.modules.get(name) for name in ("nki", "nki.language", "nki.isa")}
    sys.modules.update({"nki": module, "nki.language": language, "nki.isa": isa})
    try:
        yield
    finally:
        for name, original in replaced.items():
            if original is None:
                del sys.modules[name]
            else:
                sys.modules[name] = original
