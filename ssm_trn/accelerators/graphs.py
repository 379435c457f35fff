"""What the graph of one step is like on an XLA device: its length, the time to compile it, what leaves the device."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

_INSTRUCTION = re.compile(r"^\s+(ROOT )?\S+ = ", re.MULTILINE)


class Graph(NamedTuple):
    instructions: int  # of HLO, before the compiler has changed it
    compile_seconds: float | None  # None: not compiled
    fallbacks: tuple[str, ...]  # operations that ran on the CPU, as XLA has no form of them


def graph_of(step: Callable[[], Sequence[Tensor]], compiled: bool = True) -> Graph:
    """The graph that makes the results of `step`, which are tensors on the XLA device; compiled and run if wanted.

    What was put off until now is computed first, so that it is no part of the graph.
    """
    import torch_xla
    from torch_xla.debug import metrics

    torch_xla.sync(wait=True)
    metrics.clear_all()
    results = list(step())
    instructions = len(_INSTRUCTION.findall(torch_xla._XLAC._get_xla_tensors_hlo(results)))
    fallbacks = tuple(sorted(name for name in metrics.counter_names() if name.startswith("aten::")))
    if not compiled:
        return Graph(instructions, None, fallbacks)
    torch_xla.sync(wait=True)
    _, nanoseconds, _ = metrics.metric_data("CompileTime")
    return Graph(instructions, nanoseconds / 1e9, fallbacks)
