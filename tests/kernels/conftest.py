"""A machine for tests that call instructions outside a kernel."""

import pytest

from ssm_nki.simulator import Machine


@pytest.fixture(params=["gen2", "gen3", "gen4"])
def generation(request):
    """Each generation in turn, with a machine of it running."""
    with Machine(request.param).running():
        yield request.param


@pytest.fixture
def gen2():
    """A running machine of gen2."""
    with Machine("gen2").running() as machine:
        yield machine
