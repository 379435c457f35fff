"""Softmax attention against its definition, with every way in which steps may be hidden from each other."""

from itertools import pairwise

import pytest
import torch

from ssm_trn import ops
from ssm_trn.ops.attention import empty_cache

B, H, HK, K, V = 2, 4, 2, 6, 5


def inputs(length, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, length, H, K), (B, length, HK, K), (B, length, HK, V))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def by_definition(q, k, v, window=None, mask=None, reset=None):
    """Each sequence alone, each document alone, masked steps deleted: then plain windows of a causal softmax."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        start = 0
        real = []
        for t in range(q.shape[1]):
            if mask is not None and not mask[b, t]:
                continue
            if reset is not None and reset[b, t]:
                start = len(real)
            real.append(t)
            seen = real[max(start, len(real) - (window or len(real))) :]
            for h in range(q.shape[2]):
                group = h // (q.shape[2] // k.shape[2])
                weights = (k[b, seen, group] @ q[b, t, h] / K**0.5).softmax(0)
                out[b, t, h] = weights @ v[b, seen, group]
    return out


def random_bool(length, probability, seed):
    return torch.rand(B, length, generator=torch.Generator().manual_seed(seed)) < probability


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("hide", ["nothing", "mask", "reset", "both"])
def test_equals_the_definition_in_one_pass_and_in_pieces(backend, window, hide):
    length = 13
    q, k, v = inputs(length)
    mask = random_bool(length, 0.7, 1) if hide in ("mask", "both") else None
    reset = random_bool(length, 0.2, 2) if hide in ("reset", "both") else None
    expected = by_definition(q, k, v, window, mask, reset)

    def run(first, last, cache):
        part = slice(first, last)
        hidden = {name: x[:, part] for name, x in (("mask", mask), ("reset", reset)) if x is not None}
        return ops.attention(q[:, part], k[:, part], v[:, part], window=window, cache=cache, **hidden)

    with ops.use_backend(backend):
        torch.testing.assert_close(run(0, length, None)[0], expected)
        for pieces in ((0, 5, 13), (0, 1, 2, 12, 13), tuple(range(14))):
            slots = 3 if window is None else window
            for cache in (None, empty_cache(B, slots, (HK, K), (HK, V), "cpu", torch.float64)):
                outs = []
                for first, last in pairwise(pieces):
                    out, cache = run(first, last, cache)
                    outs.append(out)
                torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_decode_steps_keep_the_shapes_of_a_cache_made_for_the_whole_length():
    q, k, v = inputs(8)
    for window, slots in ((None, 9), (3, 3)):
        cache = empty_cache(B, slots, (HK, K), (HK, V), "cpu", torch.float64)
        shapes = [x.shape for x in cache]
        for t in range(8):
            _, cache = ops.attention(q[:, [t]], k[:, [t]], v[:, [t]], window=window, cache=cache)
            assert [x.shape for x in cache] == shapes


def test_a_cache_is_continued_twice_one_after_the_other():
    q, k, v = inputs(6)
    cache = empty_cache(B, 9, (HK, K), (HK, V), "cpu", torch.float64)
    _, context = ops.attention(q[:, :4], k[:, :4], v[:, :4], cache=cache)
    for _ in range(2):
        for last in (4, 5):
            parts = [torch.cat([x[:, :4], x[:, [last]]], 1) for x in (q, k, v)]
            out, _ = ops.attention(*(x[:, 4:] for x in parts), cache=context)
            torch.testing.assert_close(out, by_definition(*parts)[:, 4:])


def test_gradients_reach_the_cache():
    q, k, v = (x.requires_grad_() for x in inputs(5))

    def in_two_calls(q, k, v, window):
        first, cache = ops.attention(q[:, :3], k[:, :3], v[:, :3], window=window)
        second, _ = ops.attention(q[:, 3:], k[:, 3:], v[:, 3:], window=window, cache=cache)
        return torch.cat([first, second], 1)

    for window in (None, 2):
        torch.autograd.gradcheck(lambda *args, window=window: in_two_calls(*args, window), (q, k, v))


def test_what_is_masked_may_hold_anything():
    q, k, v = inputs(8)
    mask = torch.ones(B, 8, dtype=torch.bool)
    mask[:, 3:6] = False
    clean, cache = ops.attention(q, k, v, mask=mask)
    for x in (q, k, v):
        x[:, 3:6] = 1e30
    dirty, dirty_cache = ops.attention(q, k, v, mask=mask)
    assert torch.equal(clean[mask], dirty[mask]) and not dirty[~mask].any()
    real = cache[2] >= 0
    assert torch.equal(cache[0][real], dirty_cache[0][real])


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5)), {}, "of shape"),
        (((2, 3, 4, 5), (2, 3, 3, 5), (2, 3, 3, 5)), {}, "multiple"),
        (((2, 3, 4, 5), (2, 4, 4, 5), (2, 4, 4, 5)), {}, "do not fit"),
        (((2, 3, 4, 5),) * 3, {"window": 0}, "at least 1"),
        (((2, 3, 4, 5),) * 3, {"reset": torch.zeros(1, 3, dtype=torch.bool)}, "reset must be bool"),
        (((2, 3, 4, 5),) * 3, {"mask": torch.zeros(2, 3)}, "mask must be bool"),
    ],
)
def test_wrong_shapes_are_named(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        ops.attention(*(torch.zeros(shape) for shape in shapes), **options)
