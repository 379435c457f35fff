"""XLA tensors reach the kernels, on torch-xla's CPU client: the simulator stands where the SDK would compile them."""

import importlib
import os

import pytest
import torch

from ssm_nki import sdk
from ssm_trn.ops import backends, nki, nki_operators
from tests.neuron import measure
from tests.ops.cases import CASES
from tests.ops.test_nki import KERNEL_CASES

if importlib.util.find_spec("torch_xla") is None:
    pytest.skip("torch_xla is not installed", allow_module_level=True)
if os.environ.get("PJRT_DEVICE") != "CPU":
    pytest.skip("PJRT_DEVICE=CPU asks for torch-xla's CPU client", allow_module_level=True)

import torch_xla  # noqa: E402

pytestmark = pytest.mark.xla


@pytest.fixture
def device(monkeypatch):
    """The XLA device, as if the SDK were there; `calls` are the kernels that got XLA tensors."""
    device, calls = torch_xla.device(), []
    monkeypatch.setattr(sdk, "REAL", True)
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")

    def compiled(kernel):
        def call(*arguments, **options):
            assert all(x is None or x.device.type == "xla" for x in arguments)
            calls.append(kernel.__name__)
            results = kernel(*(None if x is None else nki_operators.array_of(x.cpu()) for x in arguments), **options)
            results = results if isinstance(results, tuple) else (results,)
            return tuple(nki_operators.tensor_of(x).to(device) for x in results)

        return call

    for family in nki.KERNELS:
        for module, name in ((family, f"{family}_forward"), (f"{family}_backward", f"{family}_backward")):
            module = importlib.import_module(f"ssm_nki.{module}")
            monkeypatch.setattr(module, name, compiled(getattr(module, name)))
    yield device, calls


@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_equals_torch(case, device):
    device, calls = device
    assert all(error < 1e-5 for error in measure.compare(case, device, 40, torch.float32))
    assert calls == [f"{case.op.__name__}_forward", f"{case.op.__name__}_backward"]


# Each path of the parallel forms once: it takes XLA's compiler seconds for each.
PARALLEL = (
    "linear_attention-head-groups",
    "linear_attention-channel-bonus",
    "delta_rule-head-negative",
    "delta_rule-channel-erase",
    "selective_scan-groups-skip",
    "short_conv-bias-silu",
    "long_conv",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in PARALLEL], ids=lambda case: case.name)
def test_without_the_sdk_what_runs_is_right(case):
    with pytest.warns(RuntimeWarning, match="in its parallel form|has no NKI kernel"):
        backends._warned.clear()
        errors = measure.compare(case, torch_xla.device(), 70, torch.float32)
    assert max(errors) < 1e-5
