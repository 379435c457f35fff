"""Causal depthwise convolution: every channel has a filter of W taps of its own. The backward kernel has its own file.

    z_t = bias + sum over w of weight_w x_{t - (W - 1) + w}        y_t = z_t, or SiLU(z_t)

    x, y    input and output, D channels        weight, bias    of each channel; the last tap weighs the current step
    state   the W - 1 inputs before the first step

With channels on partitions a shift in time is a shift along the free dimension, where TensorE reads what it likes; and
the product that turns a tile back to steps on partitions weighs it too, by diag(weight_w), and adds up the taps. For a
tile of 512 steps and 512 channels:

    step                          engine    operands
    x^T, and W - 1 steps before   TensorE   SBUF [128 steps, 128 channels] -> PSUM [128 channels, 512 steps]
    evict                         ScalarE   PSUM -> SBUF [128 channels, W - 1 + 512]
    z = sum of x^T diag(weight)   TensorE   SBUF, SBUF [128 channels, 128 channels] -> PSUM [128 steps, 512 channels]
    z + bias                      VectorE   PSUM -> SBUF
    SiLU                          ScalarE   -> SBUF

Where documents are packed, `reads` says which taps would reach across a reset; what they read is zeroed, at the price
of a product on VectorE for each tap but the last. Sums are float32; x, and weights rounded to its type, are what
TensorE multiplies. Limits: W <= 32. Any T (what is left after blocks of 128 steps is a shorter block) and any D.
"""

from ssm_nki import layouts, tiles
from ssm_nki import short_conv_taps as filters
from ssm_nki.sdk import nisa, nki, nl
from ssm_nki.short_conv_backward import short_conv_backward

__all__ = ["short_conv_backward", "short_conv_forward"]


@nki.jit
def short_conv_forward(x, weight, bias=None, state=None, reads=None, silu=False):
    """(y, next state), in the type of x; for W = 1, which has no state, y alone.

    Args:
        x: [B, T, D], float32 or bfloat16.
        weight: float32 [D, W].
        bias: float32 [D]; None for none.
        state: [B, W - 1, D] in the type of x; None for zeros.
        reads: [B, W, T] in the type of x, 1 where tap w of step t reads, 0 where that would reach from the last reset,
            or from after it, to before it; the last tap always reads. None where there is no reset.
        silu: whether to end with SiLU.

    Returns:
        y: [B, T, D]; the next state: the last W - 1 inputs [B, W - 1, D], zeros for those from before the last reset.
    """
    batches, steps, channels = x.shape
    taps = weight.shape[1]
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    results = [y]
    if taps > 1:
        results.append(nl.ndarray((batches, taps - 1, channels), dtype=x.dtype, buffer=nl.shared_hbm))
    identity = tiles.mask(layouts.BLOCK, nl.float32, nl.equal)
    typed_identity = tiles.mask(layouts.BLOCK, x.dtype, nl.equal)
    for first, width in layouts.parts(channels, filters.GROUP):
        weights = filters.diagonals(weight, first, width, identity, x.dtype)
        shift = None if bias is None else tiles.evict(layouts.on_all_partitions(bias, first, width), nl.float32)
        for b in range(batches):
            for time_tile in layouts.time_tiles(steps, filters.blocks_for(taps)):
                _, count, size = time_tile
                inputs = filters.history(x, state, b, time_tile, first, width, taps, typed_identity)
                kept = filters.masks(reads, b, time_tile, 0)
                windows = filters.input_windows(inputs, kept, taps, count * size)
                out = nl.ndarray((size, count, width), dtype=x.dtype, buffer=nl.sbuf)
                for j in range(count):
                    z = filters.with_bias(filters.filtered(windows, weights, j, size, width), shift)
                    nisa.activation(dst=out[0:size, j, 0:width], op=nl.silu if silu else nl.copy, data=z)
                layouts.store(y, b, time_tile, first, out)
            if taps > 1:
                tail = filters.last_inputs(x, state, b, first, width, taps - 1)
                if reads is not None:
                    filters.forget(tail, reads, b)
                nisa.dma_copy(dst=results[1][b, 0 : taps - 1, first : first + width], src=tail)
    return tuple(results) if taps > 1 else y
