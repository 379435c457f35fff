"""On a NeuronCore (`make test-neuron`): the kernels against torch, and their latency, written to a table.

The table is kernels/measured.csv; `python -m ssm_nki.cost --measured FILE` shows it beside what is modelled.
"""

from pathlib import Path

import pytest
import torch

from ssm_nki.cases import all_cases
from tests.neuron import measure
from tests.ops.test_nki import KERNEL_CASES

pytestmark = pytest.mark.neuron
TABLE = Path(__file__).parents[2] / "kernels" / "measured.csv"
# ScalarE computes exp and the like to 1e-6 to 1e-5.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture(scope="session")
def device():
    try:
        return measure.NeuronCore()
    except LookupError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def model(device):
    return measure.modelled()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_equals_torch(case, dtype, device):
    """Results and all gradients, with an initial state and resets."""
    assert all(error < TOLERANCE[dtype] for error in measure.compare(case, device.device, 300, dtype))


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.kernel}-{case.direction}-{case.shape}")
def test_latency(case, device, model):
    row = measure.time_case(case, device, model)
    measure.write_row(TABLE, row)
    assert row["measured ms"] > 0
