"""Forms of the recurrent ops that compute all steps at once, with ordinary operators alone: what a compiler of whole
graphs needs (XLA, for NeuronCores without a kernel).

Such a compiler unrolls Python's loops, so a loop over steps or chunks would make a graph as long as the sequence. Here
chunks are one more axis, and what goes from chunk to chunk goes through a scan in log2(T) levels (Blelloch 1990,
CMU-CS-90-190, section 1.4). Nothing is written in place, and no shape and no choice depends on data. The price is
memory: the backward pass needs what the chunks exchange, and all states between them.

chunks.py says how decays are built from terms <= 0; linear_attention.py and delta_rule.py hold the equations.

Shapes: N chunks of C = 2**n steps, G groups of R heads. In the words of einsum:
    b batch   n chunk   t, s steps of a chunk   g group   r head of a group   k, v channels of keys and values
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, einsum

from ssm_trn.ops.chunks import cut, fold_reset, halvings
from ssm_trn.ops.contexts import full_precision

CHUNK_SIZE = 64


def recurrence(decay: Tensor, write: Tensor, state: Tensor, matrices: bool = False) -> Tensor:
    """S_0 = state, S_t = decay_t S_{t-1} + write_t: all states from S_0 to S_T, [B, T + 1, ...].

    Args:
        decay: [B, T, ...], numbers that broadcast to the states, or, with `matrices`, square matrices.
        write: [B, T, ...].
        state: [B, ...].
    """
    decay = torch.cat([torch.zeros_like(decay[:, :1]), decay], 1)
    return _Recurrence.apply(decay, torch.cat([state[:, None], write], 1), matrices)


class _Recurrence(torch.autograd.Function):
    """The states from a state of zero. Its gradient is the same recurrence, backwards."""

    @staticmethod
    def forward(ctx, decay: Tensor, write: Tensor, matrices: bool) -> Tensor:
        states = _scan(decay, write, torch.matmul if matrices else torch.mul)
        ctx.save_for_backward(decay, states)
        ctx.matrices = matrices
        return states

    @staticmethod
    def backward(ctx, grad_states: Tensor) -> tuple[Tensor | None, ...]:
        decay, states = ctx.saved_tensors
        before = _previous(states)
        with full_precision(states.device):
            if ctx.matrices:
                grad_write = _scan(_next(decay.mT), grad_states, torch.matmul, backwards=True)
                return grad_write @ before.mT, grad_write, None
            grad_write = _scan(_next(decay.conj()), grad_states, torch.mul, backwards=True)
            return (grad_write * before.conj()).sum_to_size(decay.shape), grad_write, None


def _scan(decay: Tensor, write: Tensor, times, backwards: bool = False) -> Tensor:
    """S_t = decay_t S_{t-1} + write_t from a state of zero, or S_t = decay_t S_{t+1} + write_t: [B, T, ...].

    Two neighbouring steps are one step, the `far` after the `near` one, of a recurrence half as long.
    """
    length = write.shape[1]
    if length == 1:
        return write
    if length % 2:
        decay, write = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1)) for x in (decay, write))
    pairs = (x.unflatten(1, (-1, 2)).unbind(2) for x in (decay, write))
    (near_decay, far_decay), (near, far) = (pair[::-1] if backwards else pair for pair in pairs)
    far = _scan(times(far_decay, near_decay), times(far_decay, near) + far, times, backwards)
    near = times(near_decay, (_next if backwards else _previous)(far)) + near
    return torch.stack((far, near) if backwards else (near, far), 2).flatten(1, 2)[:, :length]


def _previous(x: Tensor) -> Tensor:
    """x_{t-1} in place of x_t, 0 for the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _next(x: Tensor) -> Tensor:
    """x_{t+1} in place of x_t, 0 for the last."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor | None,
    reset: Tensor | None,
    state: Tensor,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The same as `reference` in linear_attention.py."""
    length, heads = v.shape[1:3]
    per_head = log_decay.dim() == 3 and bonus is None
    q, k, values = (x.to(state.dtype) for x in (q, k, v))
    log_decay = fold_reset(log_decay, reset)
    if not per_head:  # decays scale q and k, for each head apart
        q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
        log_decay = log_decay if log_decay.dim() == 4 else log_decay[..., None]
    reader, groups, size = q, q.shape[2], _power_of_2(length, chunk_size)
    if bonus is not None and reset is not None:  # q reads the state before it decays, so a reset must reach q too
        reader = q.masked_fill(reset[..., None, None], 0)
    reader, writer, chunks, log_decay = (cut(x, size).transpose(2, 3) for x in (reader, k, values, log_decay))
    chunks, state = chunks.unflatten(2, (groups, -1)), state.unflatten(1, (groups, -1))  # [B, N, G, R, C, V]
    if per_head:  # decays scale o and v: the heads of a group share the products of q and k
        pairs, start, end = head_decays(log_decay.unflatten(2, (groups, -1)))
        mix = (reader @ writer.mT)[:, :, :, None] * pairs  # [B, N, G, R, C, C]
        start, end = start[..., None], end[..., None]  # [B, N, G, R, C, 1]
        total = start[..., -1:, :]
    else:
        (mix,), (reader,), writer, total = exchange([reader], writer, log_decay, [bonus is not None])
        mix, total = (x[:, :, :, None] for x in (mix, total.mT))
        start = end = total.new_ones(())
    states = recurrence(total, einsum("bngsk,bngrsv->bngrkv", writer, chunks * end), state)
    out = mix @ chunks + einsum("bngtk,bngrkv->bngrtv", reader, states[:, :-1]) * start
    out = out.flatten(2, 3).transpose(2, 3).flatten(1, 2)[:, :length]  # [B, T, H, V]
    if bonus is not None:
        out = out + (q * bonus * k).sum(-1, keepdim=True) * values
    return (scale * out).to(v.dtype), states[:, -1].flatten(1, 2)


def delta_rule(
    steps: Sequence[Tensor], state: Tensor, chunk_size: int | None, scale: float, decay_first: bool
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + w_t z_t^T, the rule in the form that delta_rule.py gives it before `chunked`.

    Args:
        steps: q, r, w [B, T, H, K], log_decay [B, T, H, 1 or K], y [B, T, H, V], beta [B, T, H, 1].
        decay_first: whether r reads S_{t-1} after its decay.
    """
    q, r, w, log_decay, y, beta = steps
    length = y.shape[1]
    size = _power_of_2(length, chunk_size)
    inputs = (x.to(state.dtype) for x in (q, beta * r, w, log_decay, beta * y))
    q, r, w, log_decay, y = (cut(x, size).transpose(2, 3) for x in inputs)  # [B, N, H, C, ...]
    if log_decay.shape[-1] == 1 and decay_first:
        pairs, start, end = head_decays(log_decay.squeeze(-1))
        system, mix = ((x @ w.mT) * pairs for x in (r, q))
        start = start[..., None]
        r, q, w, total = r * start, q * start, w * end[..., None], start[..., -1:, :]
    else:
        (system, mix), (r, q), w, total = exchange([r, q], w, log_decay, [not decay_first, False])
    inverse = _Inverse.apply(system)
    known, forgotten = inverse @ y, inverse @ r  # z = known - forgotten S, for the state S that enters the chunk
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    states = recurrence(total.mT * identity - w.mT @ forgotten, w.mT @ known, state, matrices=True)
    entering = states[:, :-1]
    out = q @ entering + mix @ (known - forgotten @ entering)
    return scale * out.transpose(2, 3).flatten(1, 2)[:, :length], states[:, -1]


def head_decays(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """pairs [..., C, C], start and end [..., C], as in `HeadDecays`, of log_decay [..., C]."""
    # Blocks of 1, 2, 4, ... steps: start and end are [..., blocks, steps], pairs [..., blocks, steps, steps].
    start = log_decay[..., None]
    end, pairs = torch.zeros_like(start), torch.zeros_like(start)[..., None]
    while start.shape[-2] > 1:
        (start_0, start_1), (end_0, end_1) = (_halves(x, -2) for x in (start, end))
        across = start_1[..., :, None] + end_0[..., None, :]
        pairs = _joined(_halves(pairs, -3), across, -torch.inf)
        start = torch.cat([start_0, start_1 + start_0[..., -1:]], -1)
        end = torch.cat([end_0 + start_1[..., -1:], end_1], -1)
    return pairs.squeeze(-3).exp(), start.squeeze(-2).exp(), end.squeeze(-2).exp()


def exchange(
    readers: list[Tensor], writer: Tensor, log_decay: Tensor, early: list[bool]
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """What the steps of chunks exchange under a decay per channel, as in `ChannelDecays`.

    Args:
        readers, writer: [..., C, K].
        log_decay: [..., C, 1 or K].
        early: for each reader, whether it reads the state before its own step decays and writes it.

    Returns:
        products: what each reader reads of each writer [..., t, s], each [C]; 0 for t < s, and for t = s if early.
        readers: decayed from the start of the chunk [..., C, K].
        writer: decayed to the end of the chunk [..., C, K].
        total: decay of the whole chunk [..., 1, 1 or K].
    """
    own = log_decay.exp()
    # Blocks of 1, 2, 4, ... steps: products are [..., blocks, steps, steps], all else [..., blocks, steps, K].
    products, reads = [], []
    for reader, is_early in zip(readers, early, strict=True):
        present = torch.zeros_like(reader[..., 0]) if is_early else (reader * writer).sum(-1)
        products.append(present[..., None, None])
        reads.append((reader if is_early else reader * own)[..., None, :])
    writes, sums = writer[..., None, :], log_decay[..., None, :]
    while writes.shape[-3] > 1:
        (write_0, write_1), (sum_0, sum_1) = _halves(writes, -3), _halves(sums, -3)
        for i, (read_0, read_1) in enumerate([_halves(x, -3) for x in reads]):
            products[i] = _joined(_halves(products[i], -3), read_1 @ write_0.mT, 0)
            reads[i] = torch.cat([read_0, read_1 * sum_0.exp()], -2)
        writes = torch.cat([write_0 * sum_1.exp(), write_1], -2)
        sums = sum_0 + sum_1
    products, reads = ([x.squeeze(-3) for x in xs] for xs in (products, reads))
    return products, reads, writes.squeeze(-3), sums.squeeze(-3).exp()


class _Inverse(torch.autograd.Function):
    """(1 + L)^-1, where L [..., C, C] is what stands below the diagonal of the system.

    From the blocks [[A, 0], [L, B]] of 2, 4, 8, ... steps: the inverse of each is [[A', 0], [-B' L A', B']]. A whole
    level is two products of the size of the chunk, which matrix units do as fast as those of its small blocks.
    """

    @staticmethod
    def forward(ctx, system: Tensor) -> Tensor:
        size = system.shape[-1]
        inverse = torch.eye(size, dtype=system.dtype, device=system.device).expand_as(system)
        for half in halvings(size):
            block = torch.arange(size, device=system.device) // half
            across = (block[:, None] == block + 1) & (block % 2 == 0)  # from an earlier half to the later one
            inverse = inverse - inverse @ system.masked_fill(~across, 0) @ inverse
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad_inverse: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        with full_precision(inverse.device):
            return -(inverse.mT @ grad_inverse @ inverse.mT).tril(-1)


def _power_of_2(length: int, chunk_size: int | None) -> int:
    """The steps of a chunk, for a sequence of this length."""
    return 1 << (min(chunk_size or CHUNK_SIZE, length) - 1).bit_length()


def _halves(x: Tensor, blocks: int) -> tuple[Tensor, ...]:
    """The first and the second of each two neighbours along the dimension `blocks`, which counts from the end."""
    return x.unflatten(blocks, (-1, 2)).unbind(blocks)


def _joined(blocks: tuple[Tensor, ...], across: Tensor, corner: float) -> Tensor:
    """The matrix [[first, corner], [across, second]] of two blocks and what lies below the first."""
    first, second = blocks
    above = torch.cat([first, torch.full_like(across, corner)], -1)
    return torch.cat([above, torch.cat([across, second], -1)], -2)
