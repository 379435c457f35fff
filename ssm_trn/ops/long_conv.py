"""The long causal convolution: one filter per channel, as long as the sequence.

    y_t = sum over s <= t of kernel[t - s] x_s

The filter is a function of the lag (Hyena: Poli et al. 2023, arXiv:2302.10866), or the impulse response of a
state-space model whose matrices do not depend on the input (S4D: Gu et al. 2022, arXiv:2206.11893). A step reads all
steps before it, so the state is all inputs so far, and grows.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn.ops.backends import select
from ssm_trn.ops.contexts import full_precision
from ssm_trn.ops.masking import delete_masked
from ssm_trn.ops.short_conv import short_conv

# Lags below this are summed one by one, longer ones by Fourier transforms; a power of 2. 16 and 32 are best on a CPU.
NEAR = 32


def long_conv(
    x: Tensor,
    kernel: Tensor,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves every channel with its own filter, for any number of steps.

    Args:
        x: input [B, T, D].
        kernel: filters [L, D], the tap of the present step first; L is at least S + T, taps beyond that are not used.
        mask: bool [B, T], True at real tokens. Masked steps are skipped, wherever they stand, as if they were deleted;
            the output there is finite and means nothing.
        reset: bool [B, T]; no tap reaches from such a step or a later one to before it.
        state: the inputs before the first step [B, S, D], the newest last; or None for no inputs.

    Returns:
        y [B, T, D] in the dtype of x, and the next state [B, S + T, D]: all inputs since the last reset, the newest
        last, behind zeros where there are fewer. It has the dtype of the sums, float32, or float64 where x is.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    _check(x, kernel, mask, reset, state)
    length, dtype = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    history = x.to(dtype)
    if mask is not None:
        history, reset, place = delete_masked(history, reset, mask)
    if state is not None:
        history = torch.cat([state.to(dtype), history], 1)  # [B, P, D], P = S + T
    document = None
    if reset is not None:  # the number of each input's document [B, P]
        document = F.pad(reset.cumsum(1, dtype=torch.int64), (history.shape[1] - length, 0))
    form = select("long_conv", {"reference": reference, "torch": halved, "parallel": by_matrices}, x.device)
    if length == 1:
        form = single
    with full_precision(x.device):
        y = form(history, kernel[: history.shape[1]].to(dtype), document, length)
    if mask is not None:
        y = y.gather(1, place[..., None].expand_as(y))
    return y.to(x.dtype), _newest_last(history, document, mask)


def reference(history: Tensor, kernel: Tensor, document: Tensor | None, length: int) -> Tensor:
    """The definition as a plain loop over steps.

    Args:
        history: all inputs, those of the state first [B, P, D].
        kernel: [P, D].
        document: the number of the document that each input belongs to [B, P]; None: all belong to one.
        length: number of steps, the last ones, whose output is wanted.
    """
    outputs = []
    for end in range(len(kernel) - length + 1, len(kernel) + 1):
        seen = _of_last_document(history[:, :end], None if document is None else document[:, :end])
        outputs.append((kernel[:end].flip(0) * seen).sum(1))
    return torch.stack(outputs, 1)


def single(history: Tensor, kernel: Tensor, document: Tensor | None, length: int) -> Tensor:
    """`reference` for T = 1, without the loop around the step."""
    return (kernel.flip(0) * _of_last_document(history, document)).sum(1, keepdim=True)


def _of_last_document(history: Tensor, document: Tensor | None) -> Tensor:
    """The inputs [B, P, D] with those of other documents than that of the last step set to 0."""
    if document is None:
        return history
    return history.masked_fill((document != document[:, -1:])[..., None], 0)


# The form that runs. One Fourier transform over all steps would mix documents, and would carry rounding errors of later
# steps into earlier ones. So time is halved again and again: any two steps are in different halves of exactly one block
# of 2, 4, 8, ... steps. In each block the later half receives what the earlier one sends, by a convolution of the
# length of the block. What crosses its middle belongs to one document, so a reset only masks some of what is sent and
# received. Blocks up to NEAR steps, and all lags below NEAR, are left to the short convolution.
#
# The backward pass keeps the inputs alone. Both passes are custom operators, as in the other ops.


def halved(history: Tensor, kernel: Tensor, document: Tensor | None, length: int) -> Tensor:
    """The same as `reference`, in O(P log^2 P)."""
    y = _near(history, kernel, document)
    if len(kernel) > NEAR:
        y = y + _far(history, kernel, document)
    return y[:, -length:]


def _near(history: Tensor, kernel: Tensor, document: Tensor | None) -> Tensor:
    """What the lags below NEAR give to each step [B, P, D]."""
    reset = None if document is None else F.pad(document.diff(dim=1) > 0, (1, 0))
    return short_conv(history, kernel[:NEAR].flip(0).T, reset=reset)[0]


def by_matrices(history: Tensor, kernel: Tensor, document: Tensor | None, length: int) -> Tensor:
    """The same with ordinary operators on real numbers alone: NeuronCores have neither Fourier transforms nor complex
    numbers. It takes O(P^2), but in products with matrices that all rows and channels share.
    """
    y, far_kernel = _near(history, kernel, document), _without_near(kernel)
    levels = levels_of(history.shape[1], document)
    x, y = (_padded(t, levels) for t in (history, y))
    for level in levels:
        cosine, sine = _waves(level.size, history)  # [size, half + 1]
        sent = _masked(level.earlier(x), level.sends)  # [B, blocks, half, D]
        x_cos, x_sin = (wave[: level.half].T @ sent for wave in (cosine, sine))  # [B, blocks, half + 1, D]
        k_cos, k_sin = (wave[: len(far_kernel)].T @ far_kernel[: level.size] for wave in (cosine, sine))
        y_cos, y_sin = x_cos * k_cos - x_sin * k_sin, x_cos * k_sin + x_sin * k_cos
        # A transform of real numbers holds all waves but the first and the last twice.
        twice = (torch.arange(level.half + 1, device=x.device) % level.half > 0).to(x.dtype)
        back_cos, back_sin = ((1 + twice) / level.size * wave[level.half :] for wave in (cosine, sine))
        received = _masked(back_cos @ y_cos + back_sin @ y_sin, level.receives)
        y_level = F.pad(received, (0, 0, level.half, 0)).flatten(1, 2)
        y = y + F.pad(y_level, (0, 0, 0, y.shape[1] - y_level.shape[1]))
    return y[:, history.shape[1] - length : history.shape[1]]


def _waves(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi t f / size, for steps t < size and frequencies f <= size / 2."""
    step = torch.arange(size, device=like.device)
    turns = (step[:, None] * step[: size // 2 + 1] + size // 2) % size - size // 2  # whole turns left out
    angle = 2 * math.pi / size * turns.to(like.dtype)
    return angle.cos(), angle.sin()


@torch.library.custom_op("ssm_trn::long_conv", mutates_args=())
def _far(history: Tensor, kernel: Tensor, document: Tensor | None) -> Tensor:
    """What the lags of at least NEAR give to each step [B, P, D]."""
    levels, kernel = levels_of(history.shape[1], document), _without_near(kernel)
    x, y = (_padded(t, levels) for t in (history, torch.zeros_like(history)))
    for level in levels:
        sent = level.transform(_masked(level.earlier(x), level.sends), 2)  # [B, blocks, half + 1, D]
        received = level.back(sent * level.transform(kernel, 0), 2)[:, :, level.half :]
        level.later(y).add_(_masked(received, level.receives))
    return y[:, : history.shape[1]].contiguous()


@_far.register_fake
def _(history, kernel, document):
    return torch.empty_like(history, memory_format=torch.contiguous_format)


@torch.library.custom_op("ssm_trn::long_conv_backward", mutates_args=())
def _far_backward(grad_y: Tensor, history: Tensor, kernel: Tensor, document: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of history and kernel."""
    levels, far_kernel = levels_of(history.shape[1], document), _without_near(kernel)
    x, grad_y, grad_x = (_padded(t, levels) for t in (history, grad_y, torch.zeros_like(history)))
    grad_kernel = torch.zeros_like(far_kernel)
    # In the first run of a compiled operator a product does not see the mark that conj() leaves: hence conj_physical().
    for level in levels:
        received = _masked(level.later(grad_y), level.receives)
        grad = level.transform(F.pad(received, (0, 0, level.half, 0)), 2)  # in its place, the later half
        grad_sent = level.back(grad * level.transform(far_kernel, 0).conj_physical(), 2)[:, :, : level.half]
        level.earlier(grad_x).add_(_masked(grad_sent, level.sends))
        sent = level.transform(_masked(level.earlier(x), level.sends), 2)
        grad_taps = level.back((grad * sent.conj_physical()).sum((0, 1)), 0)
        grad_kernel[: level.size] += grad_taps[: len(kernel)]
    return grad_x[:, : history.shape[1]].contiguous(), _without_near(grad_kernel)


@_far_backward.register_fake
def _(grad_y, history, kernel, document):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (history, kernel))


def _keep_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_far_backward(grad_y, *ctx.saved_tensors), None


_far.register_autograd(_backward, setup_context=_keep_for_backward)


class Level:
    """All blocks of 2 * half steps that have a later half, among P steps."""

    def __init__(self, half: int, length: int):
        self.half, self.size = half, 2 * half
        self.blocks = -(-(length - half) // self.size)
        self.sends: Tensor | None = None  # bool [B, blocks, half, 1], False at steps that a reset parts from the middle
        self.receives: Tensor | None = None

    def halves(self, x: Tensor) -> Tensor:
        """View of [B, P, ...] as [B, blocks, 2, half, ...]."""
        return x[:, : self.blocks * self.size].unflatten(1, (self.blocks, 2, self.half))

    def earlier(self, x: Tensor) -> Tensor:
        return self.halves(x)[:, :, 0]

    def later(self, x: Tensor) -> Tensor:
        return self.halves(x)[:, :, 1]

    def transform(self, x: Tensor, dim: int) -> Tensor:
        return torch.fft.rfft(x, n=self.size, dim=dim)

    def back(self, spectrum: Tensor, dim: int) -> Tensor:
        return torch.fft.irfft(spectrum, n=self.size, dim=dim)


def levels_of(length: int, document: Tensor | None = None) -> list[Level]:
    """The blocks of all sizes above NEAR among `length` steps."""
    levels, half = [], NEAR
    while half < length:
        levels.append(Level(half, length))
        half *= 2
    if document is not None:
        document = _padded(document[..., None], levels)
        for level in levels:
            crossing = level.earlier(document)[:, :, -1:]
            level.sends, level.receives = level.earlier(document) == crossing, level.later(document) == crossing
    return levels


def _padded(x: Tensor, levels: list[Level]) -> Tensor:
    """x [B, P, D] with zeros behind it, so that the blocks of each level are whole."""
    longest = max((level.blocks * level.size for level in levels), default=0)
    return F.pad(x, (0, 0, 0, max(0, longest - x.shape[1])))


def _masked(x: Tensor, kept: Tensor | None) -> Tensor:
    return x if kept is None else x.masked_fill(~kept, 0)


def _without_near(kernel: Tensor) -> Tensor:
    return F.pad(kernel[NEAR:], (0, 0, NEAR, 0))


def _newest_last(history: Tensor, document: Tensor | None, mask: Tensor | None) -> Tensor:
    """The state [B, P, D]: of what a row has in its last document, the newest input stands last."""
    history = _of_last_document(history, document)
    if mask is None:
        return history
    masked = (~mask).sum(1, keepdim=True)  # so many zeros end each row, and move to its front
    index = (torch.arange(history.shape[1], device=history.device) - masked).remainder(history.shape[1])  # [B, P]
    return history.gather(1, index[..., None].expand_as(history))


def _check(x: Tensor, kernel: Tensor, mask: Tensor | None, reset: Tensor | None, state: Tensor | None) -> None:
    if x.dim() != 3 or x.shape[1] == 0:
        raise ValueError(f"x must be [batch, time >= 1, channels], got {list(x.shape)}")
    batch, length, channels = x.shape
    if state is not None and (state.dim() != 3 or state.shape[::2] != (batch, channels)):
        raise ValueError(f"state must be [{batch}, inputs so far, {channels}], got {list(state.shape)}")
    total = length + (0 if state is None else state.shape[1])
    if kernel.dim() != 2 or kernel.shape[1] != channels or kernel.shape[0] < total:
        raise ValueError(f"kernel must be [at least {total} lags, {channels} channels], got {list(kernel.shape)}")
    for name, t in (("mask", mask), ("reset", reset)):
        if t is not None and (t.shape != (batch, length) or t.dtype != torch.bool):
            raise ValueError(f"{name} must be bool [{batch}, {length}], got {t.dtype} {list(t.shape)}")
