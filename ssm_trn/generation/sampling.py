"""How the next token is chosen from logits x [B, V].

    x_i / theta where x_i > 0, x_i theta elsewhere, for tokens i that occurred      repetition penalty theta
    x / temperature                                                                 temperature
    the k largest x                                                                 top-k
    the fewest likeliest tokens whose probabilities add up to p                     top-p

in this order; then one token is drawn from the softmax of those that are left. Repetition penalty: Keskar et al. 2019
(arXiv:1909.05858), section 4.1, which divides all x by theta; a negative one would gain by that, so it is multiplied,
as in transformers. Top-k: Fan et al. 2018 (arXiv:1805.04833), section 5. Top-p: Holtzman et al. 2019
(arXiv:1904.09751), section 3.1.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_type_hints

import torch
from torch import Tensor

from ssm_trn.config import check_types

# Beyond these logits / temperature and logits * penalty would leave the range of float32.
_LOWEST_TEMPERATURE = 1e-6
_LARGEST_PENALTY = 1e6


@dataclass(frozen=True)
class Sampling:
    """How a next token is chosen; by default it is the likeliest.

    Args:
        temperature: the higher, the more even the choice; 0: the likeliest token, whatever top_k and top_p are.
        top_k: choose among the k likeliest tokens (more where several are equal to the last of them); None: among all.
        top_p: choose among the fewest likeliest tokens that have this probability together, between 0 and 1.
        repetition_penalty: above 1 makes tokens less likely that the row already has, those of its prompt included.

    Raises:
        ValueError: for values out of range or of another type.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        check_types("sampling", vars(self), get_type_hints(Sampling))
        if self.temperature != 0 and self.temperature < _LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (the likeliest token) or at least "
                f"{_LOWEST_TEMPERATURE}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 1 / _LARGEST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be at least {1 / _LARGEST_PENALTY} and at "
                f"most {_LARGEST_PENALTY:.0f}"
            )

    def filtered(self, logits: Tensor, occurred: Tensor | None = None) -> Tensor:
        """The logits [B, V] to draw from at a temperature above 0, -inf where a token is out of the choice.

        occurred: bool [B, V], the tokens that a row has; only the repetition penalty needs it.
        """
        logits = self._penalised(logits, occurred) / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        return keep_top_p(logits, self.top_p) if self.top_p < 1 else logits

    def choose(self, logits: Tensor, occurred: Tensor | None = None, uniform: Tensor | None = None) -> Tensor:
        """The next token int64 [B] for logits [B, V], in float32 or wider.

        uniform: [B] in [0, 1), the chance that decides where the temperature is above 0.
        """
        if self.temperature == 0:
            return self._penalised(logits, occurred).argmax(-1)
        if uniform is None:
            raise ValueError("a temperature above 0 needs a random number for each row: pass uniform")
        return draw(self.filtered(logits, occurred), uniform)

    def occurred(self, rows: Sequence[Collection[int]], vocab_size: int) -> Tensor | None:
        """bool [B, V], which tokens each row has; None where the repetition penalty does not ask for it."""
        if self.repetition_penalty == 1:
            return None
        occurred = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        for row, tokens in zip(occurred, rows, strict=True):
            row[list(tokens)] = True
        return occurred

    def _penalised(self, logits: Tensor, occurred: Tensor | None) -> Tensor:
        if self.repetition_penalty == 1:
            return logits
        if occurred is None:
            raise ValueError("a repetition penalty needs the tokens that each row has: pass occurred")
        return penalise(logits, occurred, self.repetition_penalty)


GREEDY = Sampling()


def penalise(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Logits [B, V] with those of tokens that occurred (bool [B, V]) made smaller by a penalty above 1."""
    return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits [B, V] with -inf where a token is less likely than the k likeliest."""
    lowest = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]  # [B, 1]
    return logits.masked_fill(logits < lowest, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits [B, V] with -inf where those that are likelier than the token already have probability p."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities  # exactly 0 for the likeliest, which always stays
    p = max(p, torch.finfo(likelier.dtype).tiny)  # where they are compared, a smaller one would be 0
    return torch.full_like(logits, -math.inf).scatter(-1, tokens, ordered.masked_fill(likelier >= p, -math.inf))


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """A token int64 [B] from the softmax of logits [B, V]: the first whose cumulative probability is above `uniform`.

    uniform: [B] in [0, 1). A token with probability 0 is never drawn, however the sums are rounded.
    """
    probabilities = logits.softmax(-1)
    reached = probabilities.cumsum(-1).masked_fill(probabilities == 0, 0)
    return (reached > uniform[:, None] * reached.amax(-1, keepdim=True)).int().argmax(-1)
