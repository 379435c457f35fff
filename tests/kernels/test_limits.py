"""What `supports` answers beyond the limits of each kernel, which stand in the tests of that kernel."""

import ml_dtypes
import numpy as np
import pytest
import torch

from ssm_nki import supports

SHAPES = {"k": (1, 8, 2, 128), "v": (1, 8, 4, 128)}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_types_by_any_name(dtype):
    assert supports("delta_rule", SHAPES, dict.fromkeys(SHAPES, dtype))
    assert supports("delta_rule", SHAPES, {"k": dtype, "v": "float32"}).limit.endswith("not k bfloat16, v float32")


@pytest.mark.parametrize("dtype", ["float64", torch.float64, np.dtype(np.float64)])
def test_types_that_kernels_lack(dtype):
    assert supports("delta_rule", SHAPES, {"v": dtype}).limit.endswith("takes float32 and bfloat16, and v is float64")


def test_wrong_questions():
    with pytest.raises(ValueError, match="^The limits of delta_rule are of v too: give its shape.$"):
        supports("delta_rule", {"k": SHAPES["k"]}, {})
    with pytest.raises(ValueError, match="^There is no kernel 'attention'; there are linear_attention, "):
        supports("attention", {}, {})
