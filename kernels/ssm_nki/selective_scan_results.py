"""What the backward pass of the selective scan returns, from the sums that its scans leave.

The functions here are inlined into ssm_nki.selective_scan_backward, whose names they use.
"""

from ssm_nki import layouts, tiles
from ssm_nki.sdk import nisa, nl


def in_memory(x, A, B, C, D):
    """The gradients in HBM, by name; None where there is none."""
    batches, steps, channels = x.shape
    states = A.shape[1]
    grads = {
        "x": nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm),
        "dt": nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm),
        "A": nl.ndarray((channels, states), dtype=nl.float32, buffer=nl.shared_hbm),
        "state": nl.ndarray((batches, channels, states), dtype=nl.float32, buffer=nl.shared_hbm),
        "B": None,
        "C": None,
        "D": None,
    }
    if B is not None:
        grads["B"] = nl.ndarray((batches, steps, states), dtype=B.dtype, buffer=nl.shared_hbm)
    if C is not None:
        grads["C"] = nl.ndarray((batches, steps, states), dtype=C.dtype, buffer=nl.shared_hbm)
    if D is not None:
        grads["D"] = nl.ndarray((channels,), dtype=nl.float32, buffer=nl.shared_hbm)
    return grads


def products_over_states(first, second):
    """The sum over N of first * second, [S, J, N] in SBUF: a new float32 tile [S, J] (VectorE)."""
    size, count, states = first.shape
    product = nl.ndarray(first.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=first, data2=second, op=nl.multiply)
    sums = nl.ndarray((size, count), dtype=nl.float32, buffer=nl.sbuf)
    for j in range(count):
        nisa.tensor_reduce(dst=sums[0:size, j : j + 1], op=nl.add, data=product[0:size, j, 0:states], axis=1)
    return sums


def overlap(shared, rows, k):
    """The sum over the k-th channels of gy w, into column k of shared["grad_y_written"][S, J, K] (VectorE)."""
    size, count, lanes = rows["x"].shape
    product = nl.ndarray(rows["x"].shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=rows["grad_y"], data2=rows["written"], op=nl.multiply)
    for j in range(count):
        total = shared["grad_y_written"][0:size, j, k : k + 1]
        nisa.tensor_reduce(dst=total, op=nl.add, data=product[0:size, j, 0:lanes], axis=1)


def of_steps(rows, sums, shared, tools, scale_input):
    """New tiles [S, J, lanes]: the gradient of dt, float32, and that of x through w, in the type of x."""
    size, count, lanes = rows["x"].shape
    exponent_back = tiles.evict(sums["exponent_back"], nl.float32)
    exponent_rows = tiles.evict(layouts.steps_first(exponent_back, count, size, tools["identity"]), nl.float32)
    exponent = nl.ndarray(rows["x"].shape, dtype=nl.float32, buffer=nl.psum)
    written = nl.ndarray(rows["x"].shape, dtype=nl.float32, buffer=nl.sbuf)
    for j in range(count):
        back = exponent_rows[0:size, count - 1 - j, 0:lanes]
        layouts.add(exponent[0:size, j, 0:lanes], back, shared["reversal"])
        nisa.scalar_tensor_tensor(
            dst=written[0:size, j, 0:lanes],
            data=rows["grad_y"][0:size, j, 0:lanes],
            op0=nl.multiply,
            operand0=shared["overlaps"][0:size, j : j + 1],
            op1=nl.add,
            operand1=sums["written"][0:size, j, 0:lanes],
        )
    if not scale_input:
        return tiles.evict(exponent, nl.float32), written
    grad_dt = nl.ndarray(rows["x"].shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=grad_dt, data1=written, data2=rows["x"], op=nl.multiply)
    nisa.tensor_tensor(dst=grad_dt, data1=grad_dt, data2=exponent, op=nl.add)
    nisa.tensor_tensor(dst=written, data1=written, data2=rows["dt"], op=nl.multiply)
    return grad_dt, written


def with_skip(grad, grad_y, skip):
    """grad + D gy, a new tile like `grad`[S, J, lanes]; skip: D on all partitions (VectorE)."""
    size, count, lanes = grad.shape
    total = nl.ndarray(grad.shape, dtype=grad.dtype, buffer=nl.sbuf)
    for j in range(count):
        part = total[0:size, j, 0:lanes]
        nisa.tensor_tensor(dst=part, data1=grad_y[0:size, j, 0:lanes], data2=skip[0:size, 0:lanes], op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=grad, op=nl.add)
    return total


def add_over_time(total, rows, tools):
    """Add the sum over steps of gy x to total[lanes, 1] (VectorE, TensorE)."""
    size, count, lanes = rows["x"].shape
    product = nl.ndarray(rows["x"].shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=rows["grad_y"], data2=rows["x"], op=nl.multiply)
    sums = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.psum)
    for j in range(count):
        nisa.nc_matmul(
            dst=sums,
            stationary=product[0:size, j, 0:lanes],
            moving=tools["one_column"][0:size, 0:1],
            is_moving_onezero=True,
        )
    nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add)


def store_coefficients(grads, shared, tools, b, time_tile):
    """Store the gradients of B and C in a tile of time: shared["sums"] turned, B's half reversed and completed."""
    _, count, size = time_tile
    states = shared["reads"].shape[2]
    sums = tiles.evict(shared["sums"], nl.float32)  # [2 N, J * S]
    rows = tiles.evict(layouts.steps_first(sums, count, size, tools["identity"]), nl.float32)  # [S, J, 2 N]
    grad_B = nl.ndarray((size, count, states), dtype=tools["dtype"], buffer=nl.sbuf)
    for j in range(count):
        own = nl.ndarray((size, 1), dtype=nl.float32, buffer=nl.sbuf)
        parts = shared["grad_y_written"][0:size, j, 0 : shared["grad_y_written"].shape[2]]
        nisa.tensor_reduce(dst=own, op=nl.add, data=parts, axis=1)
        later = tiles.matmul(shared["reversal"], rows[0:size, count - 1 - j, states : 2 * states])
        nisa.scalar_tensor_tensor(
            dst=grad_B[0:size, j, 0:states],
            data=shared["reads"][0:size, j, 0:states],
            op0=nl.multiply,
            operand0=own,
            op1=nl.add,
            operand1=later,
        )
    if grads["B"] is not None:
        layouts.store(grads["B"], b, time_tile, 0, grad_B)
    if grads["C"] is not None:
        layouts.store(grads["C"], b, time_tile, 0, rows[0:size, 0:count, 0:states])
