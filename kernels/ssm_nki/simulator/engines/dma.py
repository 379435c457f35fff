"""The DMA engines: copies between HBM and SBUF."""

from __future__ import annotations

from typing import Any

from ssm_nki.simulator.dtypes import cast
from ssm_nki.simulator.errors import UnsupportedError, require
from ssm_nki.simulator.memory import Tensor
from ssm_nki.simulator.operands import Engine, instruction, issue


@instruction
def dma_copy(dst: Tensor, src: Tensor, dst_rmw_op: Any = None, oob_mode: Any = None, dge_mode: Any = None) -> None:
    """dst = src, element by element in row-major order; neither may be in PSUM (which NKI 0.2.0 cannot do).

    oob_mode and dge_mode change nothing here.
    """
    if dst_rmw_op is not None:
        raise UnsupportedError("The simulator does not have dst_rmw_op.")
    require(dst.size == src.size, "{!r} and {!r} differ in size.", dst, src)
    exact = dst.dtype == src.dtype
    issue(
        "dma_copy",
        Engine.dma,
        [dst],
        [src],
        lambda: src.values.reshape(-1) if exact else cast(src.values.astype("float32"), dst.dtype),
    )
