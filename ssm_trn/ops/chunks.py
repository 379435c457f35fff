"""What the chunked forms share: cutting time into chunks, and decays between the steps of a chunk.

The decay from step s to step t is exp(g_{s+1} + ... + g_t), with log decays g <= 0, possibly -inf (a reset). Such a sum
is built from its own terms, never as the difference of two cumulative sums: that would lose digits for strong decays,
give inf - inf = NaN at a reset, and need exp() of a positive number where it is split in two factors. So a chunk is
halved again and again. Any two steps s < t are in different halves of exactly one block and meet at its middle: s
decays up to there and t decays from there, by two factors that are both at most 1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOG2_E = math.log2(math.e)


def cut(x: Tensor, chunk_size: int) -> Tensor:
    """Cuts time (dimension 1) into chunks, the end padded with zeros: [B, T, ...] -> [B, ceil(T / C), C, ...].

    A step of zeros (no decay, no write) leaves every state as it is.
    """
    batch, length = x.shape[:2]
    padding = -length % chunk_size
    if padding:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    return x.reshape(batch, -1, chunk_size, *x.shape[2:])


def fold_reset(log_decay: Tensor, reset: Tensor | None) -> Tensor:
    """A reset before step t is a decay of exp(-inf) = 0 at step t. log_decay [B, T, ...], reset bool [B, T]."""
    if reset is None:
        return log_decay
    return log_decay.masked_fill(reset.reshape(reset.shape + (1,) * (log_decay.dim() - 2)), -torch.inf)


class HeadDecays:
    """The decays of one number per step, log_decay [..., C], between the steps of chunks of C = 2**n steps.

    Attributes:
        pairs: from step s to step t, [..., t, s], each [C]; 1 for t = s, 0 for t < s.
        start, end: from before the chunk through step t, and from step s to the chunk's end [..., C].
    """

    def __init__(self, log_decay: Tensor):
        size = log_decay.shape[-1]
        start = log_decay * LOG2_E  # sums from the start of a block through step t
        end = torch.zeros_like(start)  # sums after step s to the end of the block
        pairs = log_decay.new_full((*log_decay.shape, size), -torch.inf)
        pairs.diagonal(dim1=-2, dim2=-1).zero_()
        for half in halvings(size):
            (start_0, start_1), (end_0, _) = (x.unflatten(-1, (-1, 2, half)).unbind(-2) for x in (start, end))
            torch.add(start_1[..., :, None], end_0[..., None, :], out=_meetings(pairs, half))
            end_0 += start_1[..., -1:]
            start_1 += start_0[..., -1:]
        self.pairs, self.start, self.end = _exp2(pairs), _exp2(start), _exp2(end)

    def backward(self, grad_pairs: Tensor, grad_start: Tensor, grad_end: Tensor) -> Tensor:
        """The gradient of log_decay from those of the logarithms of pairs, start and end."""
        # log_decay_r counts in start_t for r <= t, in end_s for s < r, and in pairs_ts for s < r <= t.
        grad = grad_start.flip(-1).cumsum(-1).flip(-1)
        across = grad_pairs.cumsum(-1).tril_(-1).sum(-2)
        grad[..., 1:] += (grad_end.cumsum(-1) + across)[..., :-1]
        return grad


class ChannelDecays:
    """What the steps of chunks of C = 2**n steps exchange under a decay per channel, log_decay [..., C, K].

    What meets at the middle of a block is a matrix product, [m, K] times [K, m], of its later and its earlier half (the
    secondary chunks of GLA, arXiv:2312.06635, section 4.3, carried down to single steps). From m = 1 upwards, readers
    gather the decay from the start of their block, their own step excluded, and writers the decay to the end of theirs.

    Attributes:
        products: reader_t^T D writer_s, for each reader and each writer, [..., t, s], each [C], where D is the decay of
            the steps between s and t, both excluded; 0 for t <= s.
        readers: decayed from the start of the chunk, their own step excluded [..., C, K].
        writers: decayed to the end of the chunk [..., C, K].
        total: decay of the whole chunk [..., 1, K].
    """

    def __init__(self, readers: list[Tensor], writers: list[Tensor], log_decay: Tensor, keep: bool = True):
        """`keep` what `backward` needs."""
        size = log_decay.shape[-2]
        self.readers, self.writers = ([x.clone() for x in xs] for xs in (readers, writers))
        self.products = [[r.new_zeros(*r.shape[:-1], size) for _ in writers] for r in readers]
        self.levels: list[tuple] = []
        sums = log_decay * LOG2_E
        for half in halvings(size):
            lates = [_halves(r, half)[1] for r in self.readers]
            earlies = [_halves(w, half)[0] for w in self.writers]
            for late, row in zip(lates, self.products, strict=True):
                for early, product in zip(earlies, row, strict=True):
                    _meetings(product, half).copy_(late @ early.mT)
            first, second = _exp2(sums)[..., None, :].unflatten(-3, (-1, 2)).unbind(-3)  # [..., blocks, 1, K]
            if keep:
                self.levels.append((half, first, second, [x.clone() for x in lates], [x.clone() for x in earlies]))
            for x, decay in *((late, first) for late in lates), *((early, second) for early in earlies):
                torch.hardshrink(x.mul_(decay), _tiny(x.dtype), out=x)
            sums = torch.add(*sums.unflatten(-2, (-1, 2)).unbind(-2))
        self.total = _exp2(sums)

    def backward(
        self,
        grad_readers: list[Tensor],
        grad_writers: list[Tensor],
        grad_products: list[list[Tensor]],
        grad_total: Tensor,
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The gradients of readers, writers and log_decay; `grad_total` is that of the logarithm of total."""
        grad_readers, grad_writers = ([x.clone() for x in xs] for xs in (grad_readers, grad_writers))
        for half, first, second, lates, earlies in reversed(self.levels):
            grad_first = grad_second = grad_total
            grad_lates = [_halves(x, half)[1].mul_(first) for x in grad_readers]
            grad_earlies = [_halves(x, half)[0].mul_(second) for x in grad_writers]
            for late, grad_late, row in zip(lates, grad_lates, grad_products, strict=True):
                grad_first = grad_first + (late * grad_late).sum(-2)
                for early, grad_product in zip(earlies, row, strict=True):
                    grad_late += _product(_meetings(grad_product, half), early)
            for i, (early, grad_early) in enumerate(zip(earlies, grad_earlies, strict=True)):
                grad_second = grad_second + (early * grad_early).sum(-2)
                for late, row in zip(lates, grad_products, strict=True):
                    grad_early += _product(_meetings(row[i], half).mT, late)
            grad_total = torch.stack([grad_first, grad_second], -2).flatten(-3, -2)
        return grad_readers, grad_writers, grad_total


def decay_of(log_decay: Tensor) -> Tensor:
    """exp(log_decay), for log_decay <= 0."""
    return _exp2(log_decay * LOG2_E)


def halvings(size: int) -> list[int]:
    """1, 2, 4, ..., size / 2: the lengths of the halves of all blocks."""
    return [1 << level for level in range(size.bit_length() - 1)]


def _halves(x: Tensor, half: int) -> tuple[Tensor, ...]:
    """Views of the earlier and of the later halves of all blocks: [..., C, K] -> 2 of [..., blocks, half, K]."""
    return x.unflatten(-2, (-1, 2, half)).unbind(-3)


def _meetings(pairs: Tensor, half: int) -> Tensor:
    """View of the pairs of a later and an earlier half of one block: [..., C, C] -> [..., blocks, half, half]."""
    blocks = pairs.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))  # [..., blocks, 2, half, blocks, 2, half]
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _tiny(dtype: torch.dtype) -> float:
    """Decays below this are cut to 0. It is a little above the smallest normal number: arithmetic with the subnormal
    numbers beyond that is slower by orders of magnitude.
    """
    return torch.finfo(dtype).tiny ** 0.9


def _exp2(sums: Tensor) -> Tensor:
    """2 ** sums, cut to 0 where it is tiny. (exp is slow for large negative numbers on some CPUs, exp2 is not.)"""
    return F.threshold(sums, math.log2(_tiny(sums.dtype)), -torch.inf).exp2_()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, for a [..., C, C]. CPU libraries are slow at the smallest sizes of a."""
    if a.shape[-1] > 2:
        return a @ b
    return sum(column * row for column, row in zip(a.split(1, -1), b.split(1, -2), strict=True))
