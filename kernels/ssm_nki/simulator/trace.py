"""What a run did: one record for each instruction, and the room that its tensors took."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssm_nki.simulator import generations
from ssm_nki.simulator.errors import KernelError
from ssm_nki.simulator.generations import Generation
from ssm_nki.simulator.memory import Buffer, Tensor


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as an instruction addresses it."""

    storage: int  # number of the allocation
    name: str
    buffer: Buffer
    dtype: str
    itemsize: int
    allocated: int  # bytes of each partition that the whole allocation takes
    partitions: int
    elements: int  # of each partition
    stride: int  # between neighbours in the innermost dimension, in elements
    run: int  # elements that lie side by side

    @property
    def nbytes(self) -> int:
        """Bytes read or written."""
        return self.partitions * self.elements * self.itemsize


def describe(tensor: Tensor) -> Operand:
    """The record of `tensor`."""
    storage = tensor.storage
    stride, run = (tensor.access_pattern or [(1, 1)])[-1]
    return Operand(
        storage.number,
        storage.name,
        storage.buffer,
        storage.dtype.name,
        storage.dtype.itemsize,
        storage.partition_bytes,
        tensor.partitions,
        tensor.free_size,
        stride,
        run if stride == 1 else 1,
    )


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its name and engine, its operands, its operators, and what else sets its cost."""

    name: str
    engine: str  # tensor, vector, scalar, gpsimd or dma
    writes: tuple[Operand, ...]
    reads: tuple[Operand, ...]
    operators: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All operands, the written ones first."""
        return self.writes + self.reads

    def touches(self, buffer: Buffer) -> bool:
        """Whether an operand lies in `buffer`."""
        return any(operand.buffer is buffer for operand in self.operands)


@dataclass
class Trace:
    """The instructions of a run, in order."""

    generation: Generation
    instructions: list[Instruction] = field(default_factory=list)

    def lifetimes(self, buffer: Buffer) -> list[tuple[int, int, Operand]]:
        """(first instruction, last instruction, an operand) of each allocation in `buffer` that is used."""
        lives: dict[int, tuple[int, int, Operand]] = {}
        for index, instruction in enumerate(self.instructions):
            for operand in instruction.operands:
                if operand.buffer is buffer:
                    first = lives.get(operand.storage, (index,))[0]
                    lives[operand.storage] = (first, index, operand)
        return sorted(lives.values(), key=lambda life: life[0])

    def peak_sbuf(self) -> int:
        """Bytes of each partition that SBUF must hold at once, a tensor living from its first use to its last."""
        return max((total for total, _ in self._sbuf_over_time()), default=0)

    def peak_psum_banks(self) -> int:
        """Banks of PSUM that are taken at once; small tensors share a bank where they fit."""
        return max((sum(used > 0 for used in banks) for banks in self._banks_over_time()), default=0)

    def check_capacity(self) -> None:
        """Raise `KernelError` where the tensors that live at once do not fit."""
        room = self.generation.sbuf_bytes
        for total, live in self._sbuf_over_time():
            if total > room:
                largest = sorted(live, key=lambda operand: -operand.allocated)[:4]
                names = ", ".join(f"{operand.name or 'unnamed'} {operand.allocated}" for operand in largest)
                raise KernelError(
                    f"SBUF holds {room} bytes in each partition on {self.generation.name}, and {total} live at once "
                    f"in {len(live)} tensors; the largest: {names}."
                )
        for _ in self._banks_over_time():
            pass

    def _sbuf_over_time(self) -> list[tuple[int, list[Operand]]]:
        moments: list[tuple[int, list[Operand]]] = []
        live: list[tuple[int, Operand]] = []
        for first, last, operand in self.lifetimes(Buffer.sbuf):
            live = [(end, other) for end, other in live if end >= first] + [(last, operand)]
            operands = [other for _, other in live]
            moments.append((sum(other.allocated for other in operands), operands))
        return moments

    def _banks_over_time(self) -> list[list[int]]:
        """Bytes in use in each bank whenever a tensor comes to life, placed where it first fits."""
        banks, moments = [0] * generations.PSUM_BANKS, []
        live: list[tuple[int, range, int]] = []
        for first, last, operand in self.lifetimes(Buffer.psum):
            for end, places, share in live:
                if end < first:
                    for place in places:
                        banks[place] -= share
            live = [entry for entry in live if entry[0] >= first]
            places, share = self._place(operand, banks)
            for place in places:
                banks[place] += share
            live.append((last, places, share))
            moments.append(list(banks))
        return moments

    def _place(self, operand: Operand, banks: list[int]) -> tuple[range, int]:
        size = generations.PSUM_BANK_BYTES
        count = -(-operand.allocated // size)
        share = operand.allocated if count == 1 else size
        for start in range(len(banks) - count + 1):
            places = range(start, start + count)
            if all(banks[place] + share <= size for place in places):
                return places, share
        raise KernelError(
            f"PSUM has {len(banks)} banks of {size} bytes in each partition, and there is no room for "
            f"{operand.name or 'a tensor'} of {operand.allocated} bytes: the banks hold {banks}."
        )
