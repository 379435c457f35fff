"""The module that kernels see as `nki.isa`."""

from enum import Enum
from typing import Any

from ssm_nki.simulator.accumulator import ReduceCommand as reduce_cmd
from ssm_nki.simulator.engines.dma import dma_copy
from ssm_nki.simulator.engines.gpsimd import affine_select, iota, tensor_partition_reduce
from ssm_nki.simulator.engines.reductions import (
    bn_aggr,
    bn_stats,
    select_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
)
from ssm_nki.simulator.engines.scalar import activation, activation_reduce
from ssm_nki.simulator.engines.tensor import nc_matmul, nc_transpose
from ssm_nki.simulator.engines.vector import (
    memset,
    nc_stream_shuffle,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
    tensor_tensor_scan,
)
from ssm_nki.simulator.errors import MissingError
from ssm_nki.simulator.machine import current
from ssm_nki.simulator.operands import Engine as engine

__all__ = [
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "dge_mode",
    "dma_copy",
    "engine",
    "get_nc_version",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "reciprocal",
    "reduce_cmd",
    "scalar_tensor_tensor",
    "select_reduce",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
]

tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown


class nc_version(Enum):
    """Generations of NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dge_mode(Enum):
    """Who makes the descriptors of a transfer; nothing that the simulator knows depends on it."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a transfer does with addresses out of bounds; they cannot occur in the simulator."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Modes of TensorE; the simulator has `none` only."""

    none = 0
    double_row = 1


def get_nc_version() -> nc_version:
    """The generation that the kernel is being specialised for."""
    return nc_version[current().generation.name]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise MissingError(f"The simulator does not have nisa.{name}.")
