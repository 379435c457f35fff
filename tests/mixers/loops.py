"""What several of the loops written from papers need: plain, for one row [T, channels], in the dtype of the input."""

import torch.nn.functional as F


def convolved(weight, x):
    """silu of the causal convolution of x [T, C] with weight [C, W]."""
    width, padded = weight.shape[1], F.pad(x, (0, 0, weight.shape[1] - 1, 0))
    return F.silu(sum(weight[:, i] * padded[i : i + len(x)] for i in range(width)))


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
