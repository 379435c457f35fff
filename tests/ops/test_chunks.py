"""Decays inside a chunk against plain sums and products in float64, at every strength."""

import pytest
import torch

from ssm_trn.ops.chunks import ChannelDecays, HeadDecays, cut, decay_of

STRENGTHS = [1e-4, 1.0, 20.0, 1e4, torch.inf]


def gates(*shape: int, strength: float, dtype=torch.float64) -> torch.Tensor:
    """Log decays, one in five of them strong and the others weak."""
    generator = torch.Generator().manual_seed(0)
    weak = -0.1 * torch.rand(shape, generator=generator, dtype=torch.float64)
    strong = torch.rand(shape, generator=generator) < 0.2
    return torch.where(strong, -strength, weak).to(dtype)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decay_between(log_decay: torch.Tensor, after: int, through: int) -> torch.Tensor:
    """exp(sum of log_decay[..., s, :] for after < s <= through)"""
    return log_decay[..., after + 1 : through + 1, :].sum(-2).exp()


@pytest.mark.parametrize("length", [1, 4, 7, 8])
def test_cut_pads_the_end_with_steps_that_change_nothing(length):
    x = normal(2, length, 3)
    chunks = cut(x, 4)
    assert chunks.shape == (2, -(-length // 4), 4, 3)
    flat = chunks.flatten(1, 2)
    assert torch.equal(flat[:, :length], x)
    assert flat[:, length:].eq(0).all()


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("size", [1, 2, 16])
def test_head_decays(strength, size):
    log_decay = gates(3, size, strength=strength)
    decays = HeadDecays(log_decay)
    for t in range(size):
        torch.testing.assert_close(decays.start[:, t], decay_between(log_decay[..., None], -1, t)[:, 0])
        torch.testing.assert_close(decays.end[:, t], decay_between(log_decay[..., None], t, size - 1)[:, 0])
        for s in range(size):
            expected = decay_between(log_decay[..., None], s, t)[:, 0] * (s <= t)
            torch.testing.assert_close(decays.pairs[:, t, s], expected)


def test_the_gradient_of_head_decays():
    size = 8
    log_decay = gates(3, size, strength=1.0).requires_grad_()
    decays = HeadDecays(log_decay.detach())
    grad_pairs, grad_start, grad_end = normal(3, size, size), normal(3, size, seed=2), normal(3, size, seed=3)
    sums = torch.stack([log_decay[:, : t + 1].sum(-1) for t in range(size)], -1)
    exponents = sums, sums[:, -1:] - sums, (sums[:, :, None] - sums[:, None, :]).tril()
    loss = sum((g * x).sum() for g, x in zip((grad_start, grad_end, grad_pairs), exponents, strict=True))
    (expected,) = torch.autograd.grad(loss, log_decay)
    torch.testing.assert_close(decays.backward(grad_pairs, grad_start, grad_end), expected)


def plain_products(readers, writers, log_decay):
    """What ChannelDecays computes, from its definition."""
    size = log_decay.shape[-2]
    from_start = [decay_between(log_decay, -1, t - 1) for t in range(size)]
    to_end = [decay_between(log_decay, s, size - 1) for s in range(size)]
    between = [[decay_between(log_decay, s, t - 1) for s in range(t)] for t in range(size)]
    products = []
    for r in readers:
        for w in writers:
            rows = [
                torch.stack(
                    [(r[:, t] * between[t][s] * w[:, s]).sum(-1) if s < t else r.new_zeros(len(r)) for s in range(size)]
                )
                for t in range(size)
            ]
            products.append(torch.stack(rows).permute(2, 0, 1))
    decayed_readers = [torch.stack([r[:, t] * from_start[t] for t in range(size)], 1) for r in readers]
    decayed_writers = [torch.stack([w[:, s] * to_end[s] for s in range(size)], 1) for w in writers]
    return products, decayed_readers, decayed_writers, decay_between(log_decay, -1, size - 1)[:, None]


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_channel_decays(strength, size):
    readers, writers = ([normal(3, size, 5, seed=i + j) for i in range(2)] for j in (1, 5))
    log_decay = gates(3, size, 5, strength=strength)
    decays = ChannelDecays(readers, writers, log_decay)
    flat = sum(decays.products, [])
    products, decayed_readers, decayed_writers, total = plain_products(readers, writers, log_decay)
    for actual, expected in zip(
        [*flat, *decays.readers, *decays.writers, decays.total],
        [*products, *decayed_readers, *decayed_writers, total],
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("strength", [1e-4, 1.0, 20.0])
def test_the_gradient_of_channel_decays(strength):
    size = 8
    readers, writers = ([normal(3, size, 5, seed=i + j).requires_grad_() for i in range(2)] for j in (1, 5))
    log_decay = gates(3, size, 5, strength=strength).requires_grad_()
    products, decayed_readers, decayed_writers, total = plain_products(readers, writers, log_decay)
    results = [*decayed_readers, *decayed_writers, *products, total.log()]
    gradients = [normal(*x.shape, seed=i + 20) for i, x in enumerate(results)]
    expected = torch.autograd.grad(results, [*readers, *writers, log_decay], gradients)
    with torch.no_grad():
        decays = ChannelDecays(readers, writers, log_decay)
        grad_products = [gradients[4:6], gradients[6:8]]
        *actual, grad_log_decay = decays.backward(gradients[:2], gradients[2:4], grad_products, gradients[8])
    for one, two in zip([*sum(actual, []), grad_log_decay], expected, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_decay_is_a_subnormal_number(dtype):
    """Matrix products with them are slower by orders of magnitude, so they are cut to 0."""
    tiny = torch.finfo(dtype).tiny
    for strength in (0.5, 2.0, 7.0, 30.0):
        log_decay = torch.full((1, 256, 4), -strength, dtype=dtype)
        decays = HeadDecays(log_decay[..., 0])
        channels = ChannelDecays([torch.ones_like(log_decay)], [torch.ones_like(log_decay)], log_decay)
        for x in (decays.pairs, decays.start, decays.end, *channels.readers, *channels.writers, channels.total):
            assert not ((x > 0) & (x < tiny)).any()


def test_decay_of_is_exp():
    log_decay = torch.tensor([0.0, -1e-6, -1.0, -50.0, -1e4, -torch.inf])
    torch.testing.assert_close(decay_of(log_decay), log_decay.exp())
