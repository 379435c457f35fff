"""How long a kernel takes on trn1 and trn2, modelled from its trace. Nothing here was measured by us.

A kernel takes as long as its busiest resource: an engine, the DMA engines, or on trn1 one of two shared ports. An
engine is busy for the sum over its instructions of (cycles + fixed cycles) / clock. Nothing else is modelled: no
waiting for each other, no conflicts over a bank of PSUM. Against published profiles of kernels of 1 ms and more this is
right to 7 % (tests/kernels/test_cycles.py); kernels below 0.2 ms take 15 to 20 % longer.

Sources. Cycles: the costs printed in the reference of nki.isa up to Neuron SDK 2.26 (later ones leave them out), with N
the elements of each partition; entries marked (estimate) are ours. Clocks, ports, strides, trn2's fast modes: the
architecture guides. DMA: the DMA bandwidth guide. The fixed cycles fit published profiles of the fused Mamba tutorial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ssm_nki.simulator.errors import KernelError
from ssm_nki.simulator.memory import Buffer
from ssm_nki.simulator.trace import Instruction, Operand, Trace

ENGINES = ("tensor", "vector", "scalar", "gpsimd")
MINIMUM = 64  # cycles from one instruction to the next on VectorE and ScalarE, however small
FIXED = 64  # cycles that each instruction of VectorE, ScalarE and GpSimd takes beside
MATMUL_FIXED, BACK_TO_BACK = 16, 128  # matmuls of fewer columns than this take some cycles more
GPSIMD_START = 150
FLOAT32_PASSES = 4  # TensorE multiplies float32 in four passes; in two if one side is only zeros and ones
WIDE_STRIDE = 16  # bytes; beyond, an operand streams at half speed
DMA_ENGINES = 16
DMA_PARTITIONS = 8  # that one DMA engine serves
DMA_LATENCY = 1300.0  # nanoseconds, overlapped by other transfers
DMA_FULL_RUN = 512  # bytes side by side from which on a transfer is at full speed


@dataclass(frozen=True)
class Target:
    """Speeds of one NeuronCore. clocks: GHz; dma_rate: bytes per nanosecond and engine; peaks: FLOP per nanosecond."""

    name: str
    clocks: dict[str, float]
    dma_rate: float
    peak_bfloat16: float
    peak_float32: float
    fast_modes: bool  # VectorE has wider paths and modes for 16-bit data


TARGETS = {
    "gen2": Target("trn1", {"tensor": 2.8, "vector": 1.12, "scalar": 1.4, "gpsimd": 1.4}, 17.0, 92e3, 23e3, False),
    "gen3": Target("trn2", {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2}, 23.0, 79e3, 20e3, True),
}


@dataclass(frozen=True)
class Cost:
    """Modelled cost of one run of a kernel. busy: microseconds of each resource; the greatest is the kernel's time."""

    target: Target
    busy: dict[str, float]
    dma_bytes: int
    sbuf_bytes: int  # of each partition, that live at once
    psum_banks: int

    @property
    def critical(self) -> str:
        """The resource that sets the time."""
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def microseconds(self) -> float:
        """Time of the kernel."""
        return self.busy[self.critical]


def cost(trace: Trace) -> Cost:
    """The modelled cost of the run that `trace` records, on the target of its generation.

    Raises:
        KernelError: the generation is gen4, or an instruction is used whose cost nobody has published.
    """
    if trace.generation.name not in TARGETS:
        raise KernelError(f"There is no cost model for {trace.generation.name}; use gen2 (trn1) or gen3 (trn2).")
    target = TARGETS[trace.generation.name]
    busy = dict.fromkeys([*ENGINES, "dma"], 0.0)
    if trace.generation.shared_ports:
        busy |= {"psum_port": 0.0, "sbuf_port": 0.0}
    dma_bytes = 0
    for instruction in trace.instructions:
        time = busy_microseconds(instruction, target)
        busy[instruction.engine] += time
        if instruction.engine == "dma":
            dma_bytes += _moved(instruction)
        if trace.generation.shared_ports:
            for port in shared_ports(instruction):
                busy[port] += time
    return Cost(target, busy, dma_bytes, trace.peak_sbuf(), trace.peak_psum_banks())


def shared_ports(instruction: Instruction) -> list[str]:
    """The ports of trn1 that an instruction occupies: VectorE and ScalarE share PSUM's, VectorE and GpSimd SBUF's."""
    ports = {"psum_port": (Buffer.psum, ("vector", "scalar")), "sbuf_port": (Buffer.sbuf, ("vector", "gpsimd"))}
    return [
        name
        for name, (buffer, engines) in ports.items()
        if instruction.engine in engines and instruction.touches(buffer)
    ]


def busy_microseconds(instruction: Instruction, target: Target) -> float:
    """Microseconds for which an instruction keeps its engine (a transfer: its share of all DMA engines) busy."""
    if instruction.engine == "dma":
        return _moved(instruction) / _efficiency(instruction) / (DMA_ENGINES * target.dma_rate) / 1e3
    total = cycles(instruction, target) + fixed_cycles(instruction)
    return total / target.clocks[instruction.engine] / 1e3


def transfer_nanoseconds(instruction: Instruction, target: Target) -> float:
    """Nanoseconds from the start to the end of one transfer that runs alone."""
    on_chip = [operand for operand in instruction.operands if operand.buffer.on_chip]
    partitions = max((operand.partitions for operand in on_chip), default=DMA_ENGINES * DMA_PARTITIONS)
    engines = -(-partitions // DMA_PARTITIONS)
    return DMA_LATENCY + _moved(instruction) / _efficiency(instruction) / (engines * target.dma_rate)


def _moved(instruction: Instruction) -> int:
    return max(operand.nbytes for operand in instruction.operands)


def _efficiency(instruction: Instruction) -> float:
    run = min(operand.run * operand.itemsize for operand in instruction.operands)
    return min(1.0, run / DMA_FULL_RUN)


def fixed_cycles(instruction: Instruction) -> float:
    """Cycles of an instruction that do not depend on its size."""
    if instruction.engine == "tensor":
        return 0 if _moving_columns(instruction) >= BACK_TO_BACK else MATMUL_FIXED
    return 0 if instruction.name in ("iota", "affine_select") else FIXED


def cycles(instruction: Instruction, target: Target) -> float:
    """Cycles of an instruction, by the table `FORMULAS`."""
    if instruction.name not in FORMULAS:
        raise KernelError(f"No cost is published for nisa.{instruction.name}.")
    streamed = FORMULAS[instruction.name](instruction, target)
    wide = any(operand.stride * operand.itemsize > WIDE_STRIDE for operand in instruction.operands)
    streamed = 2 * streamed if wide else streamed
    if instruction.engine == "tensor":
        return streamed
    if instruction.engine == "gpsimd" and instruction.name in ("iota", "affine_select"):
        return GPSIMD_START + streamed
    return max(MINIMUM, streamed) + (MINIMUM if "readout" in instruction.options else 0)


def _elements(instruction: Instruction) -> int:
    """N: elements of each partition of the largest operand."""
    return max(operand.elements for operand in instruction.operands)


def _once(instruction: Instruction, target: Target) -> float:
    return _elements(instruction)


def _is_bfloat16(*operands: Operand) -> bool:
    return all(operand.dtype == "bfloat16" for operand in operands)


def _is_16_bit(*operands: Operand) -> bool:
    return all(operand.dtype in ("bfloat16", "float16") for operand in operands)


def _in_psum(*operands: Operand) -> bool:
    return any(operand.buffer is Buffer.psum for operand in operands)


def _copy(instruction: Instruction, target: Target) -> float:
    """tensor_copy, tensor_scalar: trn2's VectorE does four (two) 16-bit elements at once."""
    source, result = instruction.reads[0], instruction.writes[0]
    if instruction.engine == "gpsimd" and instruction.operators == ("rsqrt",):
        return 4 * max(MINIMUM, source.elements)
    if not target.fast_modes or instruction.engine != "vector" or not _is_16_bit(source, result):
        return source.elements
    contiguous = source.stride == result.stride == 1
    if _in_psum(source, result):
        return source.elements / 2 if contiguous else source.elements
    return source.elements / (4 if contiguous else 2)


def _tensor_tensor(instruction: Instruction, target: Target) -> float:
    inputs = instruction.reads
    elements = inputs[0].elements
    if _in_psum(*inputs):
        return elements
    if target.fast_modes:
        return elements / 2  # documented for 16-bit data, inferred from measurements of others for float32
    contiguous = all(operand.run == elements for operand in inputs)
    simple = instruction.operators[0] in ("add", "multiply", "subtract")
    return elements if simple and contiguous and _is_bfloat16(*instruction.operands) else 2 * elements


def _scan(instruction: Instruction, target: Target) -> float:
    elements = instruction.reads[0].elements
    return elements if target.fast_modes else 2 * elements  # trn2: inferred from measurements of others


def _scalar_tensor_tensor(instruction: Instruction, target: Target) -> float:
    data, operand1 = instruction.reads[0], instruction.reads[-1]
    fast = _is_bfloat16(data, operand1) and instruction.operators == ("subtract", "multiply") and data.elements % 2 == 0
    return data.elements if fast else 2 * data.elements


def _tensor_reduce(instruction: Instruction, target: Target) -> float:
    source, result = instruction.reads[0], instruction.writes[0]
    fast = _is_bfloat16(source, result) and instruction.operators[0] in ("add", "maximum")
    return source.elements / 2 if fast else source.elements


def _predicated(instruction: Instruction, target: Target) -> float:
    elements = instruction.writes[0].elements
    return elements if _in_psum(*instruction.reads[1:]) else 2 * elements


def _memset(instruction: Instruction, target: Target) -> float:
    result = instruction.writes[0]
    halved = "zero" in instruction.options and _is_16_bit(result) and instruction.engine == "vector"
    return result.elements / 2 if halved else result.elements


def _moving_columns(instruction: Instruction) -> int:
    """Columns of the moving operand; of a transposition, the identity's, which are the partitions of the data."""
    if instruction.name == "nc_transpose":
        return instruction.reads[0].partitions
    return instruction.reads[1].elements


def _matmul(instruction: Instruction, target: Target) -> float:
    stationary = instruction.reads[0]
    passes = 1
    if stationary.dtype == "float32":
        exact = "one_zero" in instruction.options or (instruction.name == "nc_transpose" and target.fast_modes)
        passes = FLOAT32_PASSES // 2 if exact else FLOAT32_PASSES
    return passes * max(min(64, stationary.elements), _moving_columns(instruction))


def _transpose(instruction: Instruction, target: Target) -> float:
    return _matmul(instruction, target) if instruction.engine == "tensor" else instruction.reads[0].elements


FORMULAS: dict[str, Callable[[Instruction, Target], float]] = {
    "activation": _once,
    "activation_reduce": _once,
    "affine_select": _once,
    "bn_aggr": lambda instruction, target: 13 * instruction.reads[0].elements / 3,
    "bn_stats": _once,
    "iota": _once,
    "memset": _memset,
    "nc_matmul": _matmul,
    "nc_stream_shuffle": _once,
    "nc_transpose": _transpose,
    "reciprocal": lambda instruction, target: 8 * instruction.reads[0].elements,
    "scalar_tensor_tensor": _scalar_tensor_tensor,
    "select_reduce": _once,
    "tensor_copy": _copy,
    "tensor_copy_predicated": _predicated,
    "tensor_reduce": _tensor_reduce,
    "tensor_scalar": _copy,
    "tensor_scalar_cumulative": _once,  # (estimate)
    "tensor_scalar_reduce": _once,
    "tensor_tensor": _tensor_tensor,
    "tensor_tensor_scan": _scan,
}
