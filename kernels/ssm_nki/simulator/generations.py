"""What the three generations of NeuronCore allow, as one table.

Source: the architecture guides of trn1/inf2, trn2 and trn3 and the reference of `nki.isa` in the AWS Neuron SDK 2.32
documentation. Sizes are for one partition; there are 128 of them in SBUF and in PSUM.
"""

import os
from dataclasses import dataclass

from ssm_nki.simulator.errors import KernelError

PARTITIONS = 128
KIB = 1024
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2 * KIB  # 512 float32 numbers
STATIONARY_LIMIT = 128  # columns of the systolic array
FREE_DIMENSIONS = 4  # of an access pattern, once contiguous dimensions are merged
STRIDE_LIMIT, COUNT_LIMIT = 2**15 - 1, 2**16 - 1  # in elements
VECTOR_TRANSPOSE_LIMIT = 32  # VectorE transposes 32 x 32 at most
BN_STATS_LIMIT = 512
SBUF_RESERVED_BYTES = 16 * KIB  # kept by the compiler (documented for gen2 and gen3, assumed for gen4)


@dataclass(frozen=True)
class Generation:
    """Rules that differ between generations."""

    name: str
    target: str
    sbuf_bytes: int  # that a kernel may use
    moving_limit: int  # elements per partition of nc_matmul's moving operand
    matmul_outputs: tuple[str, ...]  # data types that nc_matmul may write
    transpose_mode: bool  # TensorE moves bits when it transposes, so that PSUM takes the data's own type
    accumulate_over_values: bool  # a matmul may add to PSUM that another engine has written
    bias_may_be_number: bool  # activation(bias=0.5), not only a tile
    reciprocal_takes_bias: bool  # activation(op=nl.reciprocal, bias=...)
    scalar_engine_copies: bool  # tensor_copy and tensor_scalar on ScalarE
    shared_ports: bool  # VectorE and ScalarE take turns at PSUM, VectorE and GpSimd at SBUF


GENERATIONS = {
    "gen2": Generation(
        name="gen2",
        target="trn1",
        sbuf_bytes=192 * KIB - SBUF_RESERVED_BYTES,
        moving_limit=512,
        matmul_outputs=("float32",),
        transpose_mode=False,
        accumulate_over_values=False,
        bias_may_be_number=False,
        reciprocal_takes_bias=False,
        scalar_engine_copies=False,
        shared_ports=True,
    ),
    "gen3": Generation(
        name="gen3",
        target="trn2",
        sbuf_bytes=224 * KIB - SBUF_RESERVED_BYTES,
        moving_limit=512,
        matmul_outputs=("float32",),
        transpose_mode=True,
        accumulate_over_values=False,
        bias_may_be_number=True,
        reciprocal_takes_bias=True,
        scalar_engine_copies=True,
        shared_ports=False,
    ),
    "gen4": Generation(
        name="gen4",
        target="trn3",
        sbuf_bytes=256 * KIB - SBUF_RESERVED_BYTES,
        moving_limit=4096,
        matmul_outputs=("float32", "bfloat16"),
        transpose_mode=True,
        accumulate_over_values=True,
        bias_may_be_number=True,
        reciprocal_takes_bias=True,
        scalar_engine_copies=True,
        shared_ports=False,
    ),
}
_ALIASES = {"trn1": "gen2", "inf2": "gen2", "trn2": "gen3", "trn3": "gen4"}


def find(name: str | None = None) -> Generation:
    """The generation called `name` (gen2 or trn1, gen3 or trn2, gen4 or trn3).

    Without a name it is what NEURON_PLATFORM_TARGET_OVERRIDE says, as with the real SDK, or gen2.
    """
    name = name or os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "gen2"
    key = _ALIASES.get(name, name)
    if key not in GENERATIONS:
        known = ", ".join([*GENERATIONS, *_ALIASES])
        raise KernelError(f"There is no generation {name!r}; the simulator knows {known}.")
    return GENERATIONS[key]


def start_partitions(count: int) -> tuple[int, ...]:
    """Partitions at which an operand of `count` partitions may start."""
    if count > 64:
        return (0,)
    return (0, 64) if count > 32 else (0, 32, 64, 96)
