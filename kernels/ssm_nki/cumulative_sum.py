"""Cumulative sum over time: the smallest kernel that shows how the others are written.

    y_t = x_1 + ... + x_t,   x, y: float32 [T, H]

A chunk of 128 steps at a time, with time on partitions and the H columns in the free dimension. Within a chunk the sum
is a product with a triangle of ones; the total of all chunks before is added to it in PSUM by a second product:

    y[c] = U^T x[c] + 1^T total,     U_st = 1 for s <= t

    step              engine               operands
    load x[c]         DMA                  HBM -> SBUF [128, H]
    U^T x[c]          TensorE              SBUF [128, 128], SBUF [128, H] -> PSUM [128, H]
    + 1^T total       TensorE              SBUF [1, 128], SBUF [1, H] -> the same PSUM
    evict, store      ScalarE, DMA         PSUM -> SBUF -> HBM
    total += 1 x[c]   TensorE, VectorE     SBUF [128, 1], SBUF [128, H] -> PSUM [1, H] -> SBUF

The last chunk may be shorter. Limit: H <= 512, one bank of PSUM.
"""

from ssm_nki import tiles
from ssm_nki.sdk import nisa, nki, nl

CHUNK = 128  # steps: as many as there are partitions


@nki.jit
def cumulative_sum(x):
    """y: float32 [T, H] for x: float32 [T, H]."""
    steps, columns = x.shape
    y = nl.ndarray((steps, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    upper = tiles.mask(CHUNK, nl.float32, nl.greater_equal)
    one_row = tiles.filled((1, CHUNK), 1.0, nl.float32)
    one_column = tiles.filled((CHUNK, 1), 1.0, nl.float32)
    total = tiles.filled((1, columns), 0.0, nl.float32)
    for start in range(0, steps, CHUNK):
        size = min(CHUNK, steps - start)
        chunk = tiles.load(x[start : start + size, 0:columns])
        sums = tiles.matmul(upper[0:size, 0:size], chunk)  # [size, H]
        nisa.nc_matmul(dst=sums, stationary=one_row[0:1, 0:size], moving=total)
        nisa.dma_copy(dst=y[start : start + size, 0:columns], src=tiles.evict(sums, nl.float32))
        chunk_total = tiles.matmul(one_column[0:size, 0:1], chunk)  # [1, H]
        nisa.tensor_tensor(dst=total, data1=total, data2=chunk_total, op=nl.add)
    return y
