"""HBM, SBUF and PSUM: tensors, and the views an instruction may address.

A tensor is a storage and a view on it. In SBUF and PSUM dimension 0 is the partition; the others lie one after another
in each partition. A storage remembers who has written each element: nobody (its content is NaN, and reading it is an
error), TensorE (then a matmul may add to it) or anyone else.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from ssm_nki.simulator import generations
from ssm_nki.simulator.dtypes import DType
from ssm_nki.simulator.errors import MissingError, UnsupportedError, require

UNWRITTEN, WRITTEN, ACCUMULATED = 0, 1, 2  # states of an element; ACCUMULATED: the last writer was a matmul


class Buffer(Enum):
    """Kinds of memory."""

    sbuf = "SBUF"
    psum = "PSUM"
    hbm = "HBM"
    shared_hbm = "shared HBM"
    private_hbm = "private HBM"

    @property
    def on_chip(self) -> bool:
        """Whether the memory has partitions."""
        return self in (Buffer.sbuf, Buffer.psum)

    def __str__(self) -> str:
        return self.value


class Storage:
    """One allocation: `shape` elements of `dtype` in `buffer`, holding `values`, or not initialised."""

    def __init__(
        self,
        number: int,
        shape: tuple[int, ...],
        dtype: DType,
        buffer: Buffer,
        name: str,
        values: np.ndarray | None,
        portable: bool,
    ) -> None:
        self.number, self.shape, self.dtype, self.buffer, self.name = number, shape, dtype, buffer, name
        self.portable = portable  # views are limited to what the compiler of NKI 0.2.0 can do
        self.free_elements = int(np.prod(shape[1:])) if buffer.on_chip else int(np.prod(shape))
        self.partition_bytes = self.free_elements * dtype.itemsize if buffer.on_chip else 0
        self.state = np.full(shape, UNWRITTEN if values is None else WRITTEN, np.uint8)
        self.values = np.empty(shape, dtype.numpy) if values is None else values
        self.is_argument = values is not None and not buffer.on_chip

    def poison(self) -> None:
        """Fill with NaN (integers with 4), so that whatever is computed from it is seen to be wrong."""
        self.values.fill(4 if self.dtype.is_integer else np.nan)


class Tensor:
    """A view on a storage: what a kernel holds and gives to instructions.

    indexed: how often it was indexed since it was whole; is_pattern: whether `.ap` made it.
    """

    def __init__(
        self, storage: Storage, values: np.ndarray, state: np.ndarray, indexed: int = 0, is_pattern: bool = False
    ) -> None:
        self.storage, self.values, self.state = storage, values, state
        self.indexed, self.is_pattern = indexed, is_pattern

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the view, the partition first in SBUF and PSUM."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.values.size

    @property
    def dtype(self) -> DType:
        """Data type."""
        return self.storage.dtype

    @property
    def buffer(self) -> Buffer:
        """Kind of memory."""
        return self.storage.buffer

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbours along each dimension, in elements."""
        return tuple(stride // self.dtype.itemsize for stride in self.values.strides)

    @cached_property
    def offset(self) -> int:
        """Position of the first element in the storage, in elements."""
        start = self.values.__array_interface__["data"][0] - self.storage.values.__array_interface__["data"][0]
        return start // self.dtype.itemsize

    @cached_property
    def partitions(self) -> int:
        """Number of partitions (of rows in HBM)."""
        return self.shape[0]

    @cached_property
    def free_size(self) -> int:
        """Elements of each partition."""
        return self.size // self.shape[0]

    @property
    def start_partition(self) -> int:
        """First partition."""
        return self.offset // self.storage.free_elements

    def __repr__(self) -> str:
        name = f" {self.storage.name!r}" if self.storage.name else ""
        return f"<{self.dtype} tensor{name} {self.shape} in {self.buffer}>"

    def __getitem__(self, key: Any) -> Tensor:
        index = self._index(key if isinstance(key, tuple) else (key,))
        if self.storage.portable:
            require(not self.is_pattern, "NKI 0.2.0 cannot index {!r}, which .ap() made.", self)
            require(self.indexed < 2, "NKI 0.2.0 may index {!r} wrongly, as it was indexed twice before.", self)
        return Tensor(self.storage, self.values[index], self.state[index], self.indexed + 1, self.is_pattern)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UnsupportedError("Tensors are written by instructions of nki.isa, not by assignment.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingError(f"The simulator's tensors have no .{name}; portable views are slices, .reshape and .ap.")

    def _index(self, key: tuple) -> tuple[slice | int, ...]:
        if Ellipsis in key:
            place = key.index(Ellipsis)
            key = key[:place] + (slice(None),) * (self.ndim - len(key) + 1) + key[place + 1 :]
        require(len(key) <= self.ndim, "{} indices for a tensor of {} dimensions.", len(key), self.ndim)
        key = key + (slice(None),) * (self.ndim - len(key))
        index = [self._index_of(dimension, part) for dimension, part in enumerate(key)]
        kept = sum(isinstance(part, slice) for part in index)
        if self.buffer.on_chip and kept < 2 and isinstance(index[-1], int):  # on-chip tensors keep two dimensions
            index[-1] = slice(index[-1], index[-1] + 1)
        return tuple(index)

    def _index_of(self, dimension: int, part: Any) -> slice | int:
        size = self.shape[dimension]
        is_partition = self.buffer.on_chip and dimension == 0
        if isinstance(part, slice):
            start = 0 if part.start is None else part.start
            stop = size if part.stop is None else part.stop
            step = 1 if part.step is None else part.step
            require(step >= 1, "Step {} of dimension {} in {!r}: steps are 1 or more.", step, dimension, self)
            require(not is_partition or step == 1, "Step {} in {!r}: partitions have no stride.", step, self)
            require(
                0 <= start < stop <= size, "{}:{} is not within dimension {} of {!r}.", start, stop, dimension, self
            )
            return slice(start, stop, step)
        require(isinstance(part, int | np.integer), "{!r} is no index of {!r}.", part, self)
        require(0 <= part < size, "{} is not within dimension {} of {!r}.", part, dimension, self)
        return slice(part, part + 1) if is_partition else int(part)

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape; in SBUF and PSUM the partitions stay."""
        self._check_whole("reshape")
        shape = tuple(shape)
        require(int(np.prod(shape)) == self.size, "{!r} does not fill the shape {}.", self, shape)
        require(
            not self.buffer.on_chip or (len(shape) >= 2 and shape[0] == self.shape[0]),
            "reshape{} would move data between partitions of {!r}.",
            shape,
            self,
        )
        values, state = self.values.reshape(shape), self.state.reshape(shape)
        is_view = np.may_share_memory(values, self.values) and np.may_share_memory(state, self.state)
        require(is_view, "{!r} is not contiguous, so reshape{} is no view of it.", self, shape)
        return Tensor(self.storage, values, state)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> Tensor:
        """The view with strides and sizes `pattern`, [[stride, count], ...], `offset` elements into the storage."""
        for name, value in {"scalar_offset": scalar_offset, "vector_offset": vector_offset, "dtype": dtype}.items():
            if value is not None:
                raise UnsupportedError(f"The simulator does not have .ap({name}=...).")
        if indirect_dim:
            raise UnsupportedError("The simulator does not have .ap(indirect_dim=...).")
        self._check_whole("ap")
        require(
            self.offset == 0 or offset is None,
            ".ap(offset={}) on {!r}, which starts at element {}: the documentation disagrees from where it counts.",
            offset,
            self,
            self.offset,
        )
        strides, counts = zip(*pattern, strict=True)
        start = self.offset if offset is None else offset
        self._check_pattern(strides, counts, start)
        itemsize = self.dtype.itemsize
        values = self.storage.values.reshape(-1)[start:]
        state = self.storage.state.reshape(-1)[start:]
        view = np.lib.stride_tricks.as_strided
        return Tensor(
            self.storage,
            view(values, counts, [stride * itemsize for stride in strides]),
            view(state, counts, strides),
            is_pattern=True,
        )

    def _check_whole(self, method: str) -> None:
        whole = self.indexed == 0 and not self.is_pattern
        message = "NKI 0.2.0 has .{}() for whole tensors only, and {!r} is a view."
        require(whole or not self.storage.portable, message, method, self)

    def _check_pattern(self, strides: tuple[int, ...], counts: tuple[int, ...], start: int) -> None:
        require(
            min(strides) >= 0 and min(counts) >= 1,
            ".ap(strides={!r}, counts={!r}): strides are 0 or more, counts 1.",
            strides,
            counts,
        )
        steps = [stride * (count - 1) for stride, count in zip(strides, counts, strict=True)]
        inside = start >= 0 and start + sum(steps) < self.storage.values.size
        if self.buffer.on_chip:
            free = self.storage.free_elements
            require(strides[0] == free, ".ap(): the first stride must be {}, the elements of one partition.", free)
            require(len(strides) >= 2, ".ap(): a pattern in SBUF and PSUM has a partition and a free dimension.")
            inside = inside and start % free + sum(steps[1:]) < free
        require(
            inside, ".ap(): offset {} with strides={!r}, counts={!r} reaches beyond {!r}.", start, strides, counts, self
        )

    @cached_property
    def access_pattern(self) -> list[tuple[int, int]]:
        """(stride, count) of the free dimensions (in HBM, of all), outermost first, contiguous ones merged."""
        first = 1 if self.buffer.on_chip else 0
        pattern: list[tuple[int, int]] = []
        for stride, count in zip(self.strides[first:], self.shape[first:], strict=True):
            if count == 1:
                continue
            if pattern and pattern[-1][0] == stride * count:
                pattern[-1] = (stride, pattern[-1][1] * count)
            else:
                pattern.append((stride, count))
        return pattern


def check_allocation(shape: tuple[int, ...], dtype: DType, buffer: Buffer, sbuf_bytes: int) -> None:
    """Rules of nl.ndarray for one tensor: dimensions, partitions, and room in an empty memory."""
    require(len(shape) > 0 and min(shape) >= 1, "A tensor needs sizes of 1 or more, not {}.", shape)
    if not buffer.on_chip:
        return
    require(len(shape) >= 2, "A tensor in {} needs a partition and a free dimension, not {}.", buffer, shape)
    limit = generations.PARTITIONS
    require(shape[0] <= limit, "{} partitions: {} has {}.", shape[0], buffer, limit)
    room = sbuf_bytes if buffer is Buffer.sbuf else generations.PSUM_BANKS * generations.PSUM_BANK_BYTES
    needed = int(np.prod(shape[1:])) * dtype.itemsize
    require(needed <= room, "{} bytes in each partition: {} has {}.", needed, buffer, room)
