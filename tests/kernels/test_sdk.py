"""Where kernels get NKI from."""

import subprocess
import sys

import numpy as np
import pytest

from ssm_nki import sdk, simulator
from ssm_nki.simulator import Machine

FOREIGN = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def double(x):
    tile = nl.load(x)
    nisa.tensor_tensor(tile, tile, tile, nl.add)
    y = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(y, tile)
    return y
"""


def real(tmp_path, files, **environment):
    """`sdk.REAL` in a process where the package nki is made of `files`."""
    package = tmp_path / "nki"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text)
    code = "from ssm_nki import sdk; print(sdk.REAL, sdk.nl.__name__)"
    paths = [str(tmp_path), *sys.path]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; {code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


def test_the_empty_package_of_pypi_is_no_sdk(tmp_path):
    assert real(tmp_path, {"__init__.py": "WRONG = True"}) == ["False", "ssm_nki.simulator.language"]


def test_the_sdk_is_taken_where_it_is(tmp_path):
    files = {"__init__.py": "def jit(f): return f", "language.py": "", "isa.py": ""}
    assert real(tmp_path, files) == ["True", "nki.language"]


def test_the_simulator_can_be_asked_for(tmp_path):
    files = {"__init__.py": "def jit(f): return f", "language.py": "", "isa.py": ""}
    assert real(tmp_path, files, SSM_NKI_SIMULATE="1") == ["False", "ssm_nki.simulator.language"]


def test_kernels_of_others_import_the_simulator_as_nki(tmp_path, monkeypatch):
    (tmp_path / "foreign_kernels.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.get(name) for name in ("nki", "nki.isa", "nki.language")}
    with simulator.as_nki():
        import foreign_kernels
    assert {name: sys.modules.get(name) for name in before} == before
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert (foreign_kernels.double(x) == 2 * x).all()
    assert (Machine("gen3").run(foreign_kernels.double, x) == 2 * x).all()
    sys.modules.pop("foreign_kernels")


def test_a_kernel_may_call_another_and_runs_as_one_program():
    nl, nisa = simulator.language, simulator.isa

    @simulator.jit
    def fill(dst):
        nisa.memset(dst=dst, value=3.0)

    @simulator.jit
    def outer():
        tile = nl.ndarray((4, 8), nl.float32, nl.sbuf)
        fill(tile)
        y = nl.ndarray((4, 8), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=y, src=tile)
        return y

    assert (outer[1]() == 3).all()
    with pytest.raises(simulator.UnsupportedError, match="one program of a kernel, not 2"):
        outer[2]


@pytest.mark.skipif(sdk.REAL, reason="the real SDK runs kernels its own way")
def test_a_kernel_is_called_like_a_function():
    @sdk.nki.jit
    def two(x, scale=1.0):
        """Doc."""
        y = sdk.nl.ndarray(x.shape, dtype=x.dtype, buffer=sdk.nl.shared_hbm)
        tile = sdk.nl.ndarray(x.shape, dtype=x.dtype, buffer=sdk.nl.sbuf)
        sdk.nisa.dma_copy(dst=tile, src=x)
        sdk.nisa.tensor_scalar(dst=tile, data=tile, op0=sdk.nl.multiply, operand0=scale)
        sdk.nisa.dma_copy(dst=y, src=tile)
        return y, (y, scale)

    x = np.ones((4, 8), np.float32)
    first, (second, scale) = two(x, scale=3.0)
    assert first.tolist() == second.tolist() == (3 * x).tolist()
    assert (scale, two.__name__, two.__doc__) == (3.0, "two", "Doc.")


def test_without_arithmetic_the_rules_and_the_trace_are_the_same():
    def kernel(x):
        tile = simulator.language.load(x)
        simulator.isa.activation(dst=tile, op=simulator.language.log, data=tile)
        simulator.isa.tensor_copy(dst=simulator.language.ndarray((4, 9), np.float32), src=tile)

    whole, dry = Machine("gen2"), Machine("gen2", compute=False)
    for machine, message in ((whole, "nl.log is defined"), (dry, "Partitions or elements")):
        with pytest.raises(simulator.KernelError, match=message):
            machine.run(kernel, np.zeros((4, 8), np.float32))
    with pytest.raises(simulator.KernelError, match="Partitions or elements"):
        whole.run(kernel, np.ones((4, 8), np.float32))
    assert whole.trace.instructions == dry.trace.instructions
