"""What the tests of all kernels share: types, keys, how near is near, names of cases."""

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
BOUNDS = {FLOAT32: (1e-5, 1e-4), BFLOAT16: (1e-2, 2e-2)}  # relative errors of results, of gradients


def similar_keys(random: np.random.Generator, shape: tuple[int, ...], cosine: float, exact: bool = False) -> np.ndarray:
    """Keys of length 1 and that mean cosine with each other; `exact`: their elements are s or -s, s^2 = 1 / K."""
    if exact:
        common = np.sign(random.standard_normal(shape[-1]))
        flipped = random.random(shape) < (1 - cosine**0.5) / 2
        return np.where(flipped, -common, common) / np.sqrt(shape[-1])
    common = random.standard_normal(shape[-1])
    own = random.standard_normal(shape)
    common, own = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (common, own))
    keys = cosine**0.5 * common + (1 - cosine) ** 0.5 * own
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


def error(found: np.ndarray, want: np.ndarray) -> float:
    """Relative error of an array against one in float64."""
    return float(np.linalg.norm(found.astype(np.float64) - want) / np.linalg.norm(want))


def assert_near(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], dtype: np.dtype) -> None:
    """Every result, by name, is as near to the wanted one as activations of `dtype` allow; grad_... are gradients."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert found[name].shape == want.shape
        difference, size = np.linalg.norm(found[name].astype(np.float64) - want), np.linalg.norm(want)
        assert difference <= BOUNDS[dtype]["grad" in name] * size, f"{name}: {difference:.1e} of {size:.1e}"


def every(**axes: list) -> list[dict[str, Any]]:
    """All points of the cross product of `axes`."""
    return [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]


def case_id(case: dict[str, Any]) -> str:
    """The name of a test for a point of a cross product."""
    return " ".join(str(value) for value in case.values())
