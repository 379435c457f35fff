"""Where kernels get NKI from: `from ssm_nki.sdk import nisa, nki, nl`.

That is the Neuron SDK where it is installed; the simulator where it is not, or where SSM_NKI_SIMULATE=1 asks for it.
PyPI has an empty package called nki, so what counts is whether `nki.jit` exists.
"""

import importlib
import importlib.util
import os

__all__ = ["REAL", "nisa", "nki", "nl"]


def _is_real() -> bool:
    if os.environ.get("SSM_NKI_SIMULATE") == "1" or importlib.util.find_spec("nki") is None:
        return False
    return hasattr(importlib.import_module("nki"), "jit")


REAL = _is_real()  # whether kernels are compiled for a NeuronCore
nki = importlib.import_module("nki" if REAL else "ssm_nki.simulator")
nl = importlib.import_module("nki.language" if REAL else "ssm_nki.simulator.language")
nisa = importlib.import_module("nki.isa" if REAL else "ssm_nki.simulator.isa")
