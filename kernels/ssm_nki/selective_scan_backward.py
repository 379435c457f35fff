"""The backward pass of ssm_nki.selective_scan.

    h_t = a_t h_{t-1} + w_t B_t     y_t = sum over states of C_t h_t + D x_t     a_t = exp(dt_t A)     w_t = dt_t x_t

With v_t, the gradient that reaches h_{t-1} through step t, a scan back in time, and gy, the gradient of y:

    v_t = a_t (gy_t C_t + v_{t+1})              v of the step after the last: the gradient of the last state
    gradient of h_t      = gy_t C_t + v_{t+1}
    gradient of dt_t A   = q_t = v_t h_{t-1}    exact also where a_t is tiny: nothing is subtracted
    gradient of C_t      = sum over channels of gy_t h_t
    gradient of B_t      = sum over channels of w_t v_{t+1}  +  C_t sum over channels of gy_t w_t
    gradient of w_t      = sum over states of B_t v_{t+1}  +  gy_t sum over states of B_t C_t

and from those of dt A and w the gradients of dt, A and x. Instructions run forward in time only, so the scan back needs
time reversed: TensorE does that where it turns tiles anyway, by the reversal in place of the identity. Names that end
in `_back` are reversed. For a tile of 512 steps, 128 channels (on partitions unless said) and one state n:

    step                                     engine
    h again, from the saved state            as in the forward kernel
    gy h, summed over channels               VectorE, TensorE (ones in row n add up to [2 N, 512] in PSUM)
    (gy C_n)_back                            TensorE, by the reversal with rows scaled by C_n -> PSUM
    v_back                                   ScalarE (exp), VectorE (scan: add, then multiply)
    w v, summed over channels                VectorE, TensorE
    B_n v, summed over states                TensorE, ScalarE, TensorE: [512 steps, 128 channels] in PSUM
    h_back                                   TensorE, ScalarE, TensorE -> PSUM
    q_back = v_back h_back                   VectorE
    A_n q_back, summed over states           TensorE, by diag(A_n): [128, 512] in PSUM
    dt q, summed over time                   VectorE, ScalarE

VectorE limits it: two scans and four products. Limits are those of the forward kernel. A tile takes about 45
instructions for each state and 128 channels.
"""

from ssm_nki import layouts, tiles
from ssm_nki import selective_scan_inputs as inputs
from ssm_nki import selective_scan_results as results
from ssm_nki.sdk import nisa, nki, nl

LANES = 128  # channels: as many as there are partitions


@nki.jit
def selective_scan_backward(grad_y, grad_last, x, dt, A, B, C, D, entering, reset=None, scale_input=True):
    """The gradients of x, dt, A and the first state; then those of B, C and D, of each that is not None.

    Args:
        grad_y: gradient of y, like x.
        grad_last: gradient of the last state, float32 [B, D, N]; None for zeros.
        entering: the states that the forward kernel returns with `keep`.
        x, dt, A, B, C, D, reset, scale_input: as the forward kernel has them.

    Returns:
        Each in the shape and type of what it belongs to.
    """
    batches, steps, channels = x.shape
    states = A.shape[1]
    time_tiles = layouts.time_tiles(steps, inputs.blocks_for(states))
    grads = results.in_memory(x, A, B, C, D)
    tools = _tools(x.dtype, states)
    written_type = inputs.written_type(x.dtype, scale_input)
    lanes = layouts.parts(channels, LANES)
    rates = inputs.rates(A, lanes, reset is not None)
    rate_sums, skip_sums = [], []  # over batch and time: [lanes, N] and [lanes, 1]
    for _, width in lanes:
        rate_sums.append(tiles.filled((width, states), 0.0, nl.float32))
        skip_sums.append(tiles.filled((width, 1), 0.0, nl.float32))
    for b in range(batches):
        carries = inputs.states_of(grad_last, b, lanes, states)
        for back in range(len(time_tiles)):
            i = len(time_tiles) - 1 - back
            shared = _shared(B, C, b, time_tiles[i], states, len(lanes), written_type, tools)
            for k in range(len(lanes)):
                first, width = lanes[k]
                rows = inputs.load(x, dt, reset, scale_input, b, time_tiles[i], first, width)
                rows["grad_y"] = layouts.load(grad_y, b, time_tiles[i], first, width, x.dtype)
                h_before = tiles.load(entering[b, i, first : first + width, 0:states])
                sums = _channels(rows, h_before, carries[k], rates[k], rate_sums[k], shared, tools)
                results.overlap(shared, rows, k)
                grad_dt, grad_written = results.of_steps(rows, sums, shared, tools, scale_input)
                grad_x = grad_written
                if D is not None:
                    grad_x = results.with_skip(grad_written, rows["grad_y"], layouts.on_all_partitions(D, first, width))
                    results.add_over_time(skip_sums[k], rows, tools)
                layouts.store(grads["dt"], b, time_tiles[i], first, grad_dt)
                layouts.store(grads["x"], b, time_tiles[i], first, grad_x)
            results.store_coefficients(grads, shared, tools, b, time_tiles[i])
        for k in range(len(lanes)):
            first, width = lanes[k]
            nisa.dma_copy(dst=grads["state"][b, first : first + width, 0:states], src=carries[k])
    for k in range(len(lanes)):
        first, width = lanes[k]
        nisa.dma_copy(dst=grads["A"][first : first + width, 0:states], src=rate_sums[k])
        if D is not None:
            nisa.dma_copy(dst=grads["D"].ap(pattern=[[1, width], [1, 1]], offset=first), src=skip_sums[k])
    found = [grads["x"], grads["dt"], grads["A"], grads["state"]]
    for name in ("B", "C", "D"):
        if grads[name] is not None:
            found.append(grads[name])
    return tuple(found)


def _tools(dtype, states):
    """Constant tiles: identity and reversal, in float32 and as `dtype`; a column of ones; `unit`, whose columns from
    2 N - 1 - r on are [128, 2 N] with ones in column r: as a stationary operand it sums partitions into row r.
    """
    unit = tiles.filled((LANES, 4 * states - 1), 0.0, dtype)
    nisa.memset(dst=unit[0:LANES, 2 * states - 1 : 2 * states], value=1.0)
    return {
        "identity": tiles.mask(LANES, nl.float32, nl.equal),
        "typed_identity": tiles.mask(LANES, dtype, nl.equal),
        "reversal": layouts.reversal(LANES, nl.float32),
        "typed_reversal": layouts.reversal(LANES, dtype),
        "one_column": tiles.filled((LANES, 1), 1.0, nl.float32),
        "unit": unit,
        "dtype": dtype,
    }


def _shared(B, C, b, time_tile, states, lane_count, written_type, tools):
    """What all channels share in one tile of time, by name."""
    _, count, size = time_tile
    writes = inputs.coefficients(B, b, time_tile, states)
    reads = inputs.coefficients(C, b, time_tile, states)
    reversal = tools["reversal"][0:size, LANES - size : LANES]
    typed_reversal = tools["typed_reversal"][0:size, LANES - size : LANES]
    written_reversal = reversal if written_type == nl.float32 else typed_reversal
    writes_back = nl.ndarray(writes.shape, dtype=nl.float32, buffer=nl.sbuf)
    for j in range(count):
        turned = tiles.matmul(reversal, writes[0:size, count - 1 - j, 0:states])
        nisa.activation(dst=writes_back[0:size, j, 0:states], op=nl.copy, data=turned)
    return {
        "reads": reads,
        "overlaps": results.products_over_states(writes, reads),
        "write_weights": layouts.scaled(tools["identity"][0:size, 0:size], writes, written_type),
        "write_weights_back": layouts.scaled(reversal, writes_back, tools["dtype"]),
        "read_weights": layouts.scaled(reversal, reads, tools["dtype"]),
        "reversal": reversal,
        "typed_reversals": layouts.shared(typed_reversal, count),
        "written_reversals": layouts.shared(written_reversal, count),
        "sums": nl.ndarray((2 * states, count * size), dtype=nl.float32, buffer=nl.psum),
        "grad_y_written": nl.ndarray((size, count, lane_count), dtype=nl.float32, buffer=nl.sbuf),
    }


def _channels(rows, h_before, carry, rates, rate_sums, shared, tools):
    """Both scans for up to 128 channels; what they give is summed over states in float32 tiles in PSUM, by name:

    written [S, J, lanes], the gradient of w without the part of its own gy; exponent_back [lanes, J * S], of dt A times
    A. `carry` becomes v of the tile's first step; `rate_sums` and shared["sums"] are added to.
    """
    size, count, lanes = rows["x"].shape
    identities = layouts.shared(tools["identity"][0:size, 0:size], count)
    typed_identities = layouts.shared(tools["typed_identity"][0:size, 0:size], count)
    reversals = layouts.shared(shared["reversal"], count)
    forward = layouts.channels_first(rows["decay_steps"], 0, lanes, identities, exact=True)
    back = layouts.channels_first(rows["decay_steps"], 0, lanes, reversals, backwards=True, exact=True)
    grad_y = layouts.channels_first(rows["grad_y"], 0, lanes, typed_identities, exact=True)
    turned = {
        "step_sizes": tiles.evict(forward, nl.float32),
        "step_sizes_back": tiles.evict(back, nl.float32),
        "step_sizes_back_psum": back,  # where VectorE reads one of two operands twice as fast
        "grad_y": tiles.evict(grad_y, tools["dtype"]),
        "written_back_psum": layouts.channels_first(
            rows["written"], 0, lanes, shared["written_reversals"], backwards=True, exact=True
        ),
    }
    sums = {
        "written": nl.ndarray((size, count, lanes), dtype=nl.float32, buffer=nl.psum),
        "exponent_back": nl.ndarray((lanes, count * size), dtype=nl.float32, buffer=nl.psum),
    }
    rate_parts = nl.ndarray(rate_sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    for n in range(rate_sums.shape[1]):
        h = _states(n, rows, turned, h_before, rates, shared, tools)
        v_back = _gradients_of_states(n, rows, turned, carry, rates, shared, tools)
        _add_written(sums["written"], n, v_back, shared, tools)
        _add_exponent(sums["exponent_back"], rate_parts, n, h, v_back, turned, rates, shared, tools)
    nisa.tensor_tensor(dst=rate_sums, data1=rate_sums, data2=rate_parts, op=nl.add)
    return sums


def _states(n, rows, turned, h_before, rates, shared, tools):
    """h_{t-1} in the columns from 0 on, h_t in those from 1 on; adds gy h to the sums over channels."""
    lanes, steps = turned["step_sizes"].shape
    h = nl.ndarray((lanes, steps + 1), dtype=tools["dtype"], buffer=nl.sbuf)
    first = h_before[0:lanes, n : n + 1]
    nisa.activation(dst=h[0:lanes, 0:1], op=nl.copy, data=first)
    nisa.tensor_tensor_scan(
        dst=h[0:lanes, 1 : steps + 1],
        data0=inputs.decays(turned["step_sizes"], rates, n),
        data1=layouts.channels_first(rows["written"], 0, lanes, shared["write_weights"][n]),
        initial=first,
        op0=nl.multiply,
        op1=nl.add,
    )
    _sum_channels(shared["sums"], n, turned["grad_y"], h[0:lanes, 1 : steps + 1], tools)
    return h


def _gradients_of_states(n, rows, turned, carry, rates, shared, tools):
    """v_{t+1} in the columns from 0 on, v_t in those from 1 on, reversed; adds w v_{t+1} to the sums over channels."""
    lanes, steps = turned["step_sizes"].shape
    v_back = nl.ndarray((lanes, steps + 1), dtype=nl.float32, buffer=nl.sbuf)
    column = carry[0:lanes, n : n + 1]
    nisa.activation(dst=v_back[0:lanes, 0:1], op=nl.copy, data=column)
    nisa.tensor_tensor_scan(
        dst=v_back[0:lanes, 1 : steps + 1],
        data0=layouts.channels_first(rows["grad_y"], 0, lanes, shared["read_weights"][n], backwards=True),
        data1=inputs.decays(turned["step_sizes_back"], rates, n),
        initial=column,
        op0=nl.add,
        op1=nl.multiply,
    )
    nisa.activation(dst=column, op=nl.copy, data=v_back[0:lanes, steps : steps + 1])
    row = rates.shape[1] + n
    _sum_channels(shared["sums"], row, turned["written_back_psum"], v_back[0:lanes, 0:steps], tools)
    return v_back


def _sum_channels(sums, row, first, second, tools):
    """Add the sum over partitions of first * second to a row of `sums`."""
    lanes, rows = first.shape[0], sums.shape[0]
    product = nl.ndarray(first.shape, dtype=tools["dtype"], buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=first, data2=second, op=nl.multiply)
    selector = tools["unit"][0:lanes, rows - 1 - row : 2 * rows - 1 - row]
    nisa.nc_matmul(dst=sums, stationary=selector, moving=product, is_stationary_onezero=True)


def _add_written(sums, n, v_back, shared, tools):
    """Add B_n v_{t+1} to `sums`[S, J, lanes]."""
    size, count, lanes = sums.shape
    v_rows = tiles.evict(layouts.steps_first(v_back, count, size, tools["identity"]), tools["dtype"])
    for j in range(count):
        nisa.nc_matmul(
            dst=sums[0:size, count - 1 - j, 0:lanes],
            stationary=shared["write_weights_back"][n][j],
            moving=v_rows[0:size, j, 0:lanes],
        )


def _add_exponent(sums, rate_parts, n, h, v_back, turned, rates, shared, tools):
    """With q_t = v_t h_{t-1}: add A_n q to `sums`[lanes, J * S]; the sum over time of dt q becomes rate_parts[:, n]."""
    lanes, steps = sums.shape
    reversals = shared["typed_reversals"]
    count = len(reversals)
    h_rows = tiles.evict(layouts.steps_first(h, count, steps // count, tools["typed_identity"]), tools["dtype"])
    h_back = layouts.channels_first(h_rows, 0, lanes, reversals, backwards=True, exact=True)
    q_back = nl.ndarray((lanes, steps), dtype=tools["dtype"], buffer=nl.sbuf)
    nisa.tensor_tensor(dst=q_back, data1=v_back[0:lanes, 1 : steps + 1], data2=h_back, op=nl.multiply)
    weight = nl.ndarray((lanes, lanes), dtype=tools["dtype"], buffer=nl.sbuf)
    identity = tools["identity"][0:lanes, 0:lanes]
    nisa.activation(dst=weight, op=nl.copy, data=identity, scale=rates[0:lanes, n : n + 1])
    nisa.nc_matmul(dst=sums, stationary=weight, moving=q_back)
    product = nl.ndarray((lanes, steps), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=turned["step_sizes_back_psum"], data2=q_back, op=nl.multiply)
    total = rate_parts[0:lanes, n : n + 1]
    nisa.activation_reduce(dst=product, op=nl.copy, data=product, reduce_op=nl.add, reduce_res=total)
