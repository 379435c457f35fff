"""What the tests of the machine's rules share."""

import pytest

from ssm_nki.simulator import KernelError
from ssm_nki.simulator import isa as nisa


def refuses(match):
    return pytest.raises(KernelError, match=match)


def copy(dst, src):
    nisa.tensor_copy(dst=dst, src=src)


def matmul(dst, stationary, moving, **options):
    nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, **options)
