"""Data types, and the rounding that happens when an engine writes."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ssm_nki.simulator.errors import KernelError


@dataclass(frozen=True)
class DType:
    """A data type of NKI and the NumPy type that holds it."""

    name: str
    numpy: np.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers."""
        return self.numpy.kind in "iub"

    def __repr__(self) -> str:
        return self.name


def _of(name: str, numpy_type: object) -> DType:
    return DType(name, np.dtype(numpy_type))  # type: ignore[call-overload]


FLOAT32 = _of("float32", np.float32)
TFLOAT32 = _of("tfloat32", np.float32)  # float32 in memory, with a mantissa of 10 bits
BFLOAT16 = _of("bfloat16", ml_dtypes.bfloat16)
DTYPES = {
    dtype.name: dtype
    for dtype in (
        FLOAT32,
        TFLOAT32,
        BFLOAT16,
        _of("float16", np.float16),
        _of("float8_e4m3", ml_dtypes.float8_e4m3),
        _of("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        _of("float8_e5m2", ml_dtypes.float8_e5m2),
        _of("int8", np.int8),
        _of("int16", np.int16),
        _of("int32", np.int32),
        _of("uint8", np.uint8),
        _of("uint16", np.uint16),
        _of("uint32", np.uint32),
        _of("bool_", np.bool_),
    )
}
_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES.values() if dtype is not TFLOAT32}


def find(dtype: object) -> DType:
    """The NKI type of `dtype`, which is one already, or a NumPy type."""
    if isinstance(dtype, DType):
        return dtype
    try:
        return _BY_NUMPY[np.dtype(dtype)]  # type: ignore[call-overload]
    except (KeyError, TypeError):
        raise KernelError(f"{dtype!r} is no data type of NKI; cast to one of {', '.join(DTYPES)}.") from None


def _round_to_ten_bits(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> 13) & 1
    rounded = ((bits + 0x0FFF + even) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def cast(values: np.ndarray, dtype: DType) -> np.ndarray:
    """`values` as `dtype`: to the nearest, ties to even; integers saturate."""
    if dtype is TFLOAT32:
        return _round_to_ten_bits(values)
    if values.dtype == dtype.numpy:
        return values
    if dtype.is_integer and dtype.numpy.kind != "b" and values.dtype.kind != "b":
        limits = np.iinfo(dtype.numpy)
        wide = values if values.dtype.kind in "iu" else np.rint(np.nan_to_num(values.astype(np.float64)))
        return np.clip(wide, limits.min, limits.max).astype(dtype.numpy)
    return values.astype(dtype.numpy)
