"""Recall of pairs from the context: MQAR and a needle in a haystack."""

from dataclasses import dataclass

import numpy as np

from ssm_trn.data.datamodule import IGNORED
from ssm_trn.data.synthetic.base import Rows, Task, distinct, top, unscored


@dataclass(frozen=True)
class MultiQueryRecall(Task):
    """MQAR: pairs of a key and its value, then each key once more, at which its value is to be told.

        k1 v1 k2 v2 | x k2 x x k1 x        targets at the second k2 and k1: v2 and v1

    Keys are from 1 to vocab_size / 2 - 1, values from vocab_size / 2 on; those of a row are all different. Queries
    stand at even distances behind the pairs, the i-th place with a weight of i^(power - 1); x are random tokens.

    Attributes:
        pairs: of key and value.
        power: 1 spreads the queries evenly, smaller ones put them closer to the pairs.
    """

    paper = "Zoology, arXiv:2312.04927, section 4 and figure 2"
    setting = "vocabulary 8,192; length 64 to 512 with 4 to 64 pairs; power 0.01; 100,000 rows"
    length: int = 64
    pairs: int = 4
    vocab_size: int = 8192
    power: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.length % 2 == 0, f"length is {self.length}; it must be even")
        self.check(
            1 <= self.pairs <= self.length // 4, f"{self.pairs} pairs do not fit: length must be 4 times as much"
        )
        enough = self.vocab_size >= 2 * (self.pairs + 1) and self.vocab_size % 2 == 0
        self.check(enough, f"vocab_size must be even and at least twice the pairs and two more, not {self.vocab_size}")
        self.check(self.power > 0, f"power is {self.power}; it must be above 0")

    @property
    def answers(self) -> int:
        return self.vocab_size // 2

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        half, context, places = self.vocab_size // 2, 2 * self.pairs, self.length // 2 - self.pairs
        keys = 1 + distinct(random, rows, self.pairs, half - 1)
        values = half + distinct(random, rows, self.pairs, half)
        tokens = random.randint(self.vocab_size, size=(rows, self.length))
        tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
        # The highest of log weight + Gumbel noise are a draw by weight without putting back.
        log_weights = (self.power - 1) * np.log(np.arange(1, places + 1))
        queries = context + 2 * top(log_weights + random.gumbel(size=(rows, places)), self.pairs)
        targets = unscored(rows, self.length)
        np.put_along_axis(tokens, queries, keys, 1)
        np.put_along_axis(targets, queries, values, 1)
        return tokens, targets

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        value_of = {tokens[i]: tokens[i + 1] for i in range(0, 2 * self.pairs, 2)}
        behind = tokens[2 * self.pairs :]
        return np.array([IGNORED] * (2 * self.pairs) + [value_of.get(token, IGNORED) for token in behind])


@dataclass(frozen=True)
class Needle(Task):
    """Needles in a haystack: keys with values stand somewhere in random tokens; the last step asks for one of them.

        x x x k1 v1 x x x x k2 v2 x x k1    target at the end: v1

    Hay, keys and values have ids of their own, in this order.

    Attributes:
        needles: how many there are; one of them is asked for.
        depth: where the needle that is asked for stands, from 0 (the first step) to 1; None: anywhere.
        keys, values: how many ids there are for each.
        hay: how many ids the haystack is made of.
    """

    paper = "RULER, arXiv:2404.06654, section 3.1 (NIAH), in ids instead of words"
    setting = "1 needle, or 4 different keys; length 4,096 to 131,072 tokens of text"
    length: int = 4096
    needles: int = 1
    depth: float | None = None
    keys: int = 64
    values: int = 64
    hay: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(min(self.values, self.hay) >= 1, "values and hay must be at least 1")
        self.check(1 <= self.needles <= self.keys, f"needles must be from 1 to the {self.keys} keys")
        self.check(self.length > 2 * self.needles, f"length must be above {2 * self.needles}, the needles' own")
        self.check(self.depth is None or 0 <= self.depth <= 1, f"depth is {self.depth}; it must be from 0 to 1")

    @property
    def vocab_size(self) -> int:
        return self.hay + self.keys + self.values

    @property
    def answers(self) -> int:
        return self.values

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        keys = self.hay + distinct(random, rows, self.needles, self.keys)
        values = self.hay + self.keys + random.randint(self.values, size=(rows, self.needles))
        # Places in the haystack as if a needle were one step long; then each moves the later ones by one.
        scores = random.random_sample((rows, self.length - 1 - self.needles))
        if self.depth is not None:
            scores[:, round(self.depth * (scores.shape[1] - 1))] = 1  # the first of `top`
        places = top(scores, self.needles)
        starts = places + (places[:, :, None] > places[:, None, :]).sum(2)
        tokens, targets = random.randint(self.hay, size=(rows, self.length)), unscored(rows, self.length)
        np.put_along_axis(tokens, starts, keys, 1)
        np.put_along_axis(tokens, starts + 1, values, 1)
        tokens[:, -1], targets[:, -1] = keys[:, 0], values[:, 0]
        return tokens, targets

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        answers = np.full(self.length, IGNORED)
        answers[-1] = tokens[list(tokens).index(tokens[-1]) + 1]
        return answers
