"""The tasks of MAD (mechanistic architecture design, arXiv:2403.17844); selective copying is in copying.py."""

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from ssm_trn.data.datamodule import IGNORED
from ssm_trn.data.synthetic.base import Rows, Task, first_places, unscored

_MAD = "MAD, arXiv:2403.17844, section 3.1"


@dataclass(frozen=True)
class InContextRecall(Task):
    """Pairs of key and value, each key with the same value all along the row: at a key seen before, what is its value?

        k1 v1 k2 v2 k1 v1 k3 v3 k2 v2       targets at the second k1 and k2: v1 and v2

    Keys have the ids from 0, then come values and noise. The last key is always one that was seen.

    Attributes:
        vocab_size: keys and values, half of it each, and noise.
        noise: ids of noise.
        noise_share: of the pairs that are two tokens of noise instead; one pair of a row never is.
    """

    paper = f"{_MAD}; the paper trains on all tokens, ours on the answers"
    setting = "vocabulary 16, length 128, 12,800 rows, 200 epochs"
    length: int = 128
    vocab_size: int = 16
    noise: int = 0
    noise_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.length >= 4 and self.length % 2 == 0, f"length is {self.length}; it must be even, at least 4")
        pairs = self.vocab_size - self.noise
        self.check(pairs >= 2 and pairs % 2 == 0, f"vocab_size without noise is {pairs}; it must be even, at least 2")
        self.check(self.noise >= 0 and 0 <= self.noise_share < 1, "noise must be at least 0, noise_share in [0, 1)")
        self.check(self.noise > 0 or self.noise_share == 0, "noise_share is above 0, which needs ids: set noise")

    @property
    def answers(self) -> int:
        return (self.vocab_size - self.noise) // 2

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        pairs, kinds, row = self.length // 2, self.answers, np.arange(rows)
        noisy = random.random_sample((rows, pairs)) < self.noise_share
        noisy[row, random.randint(pairs - 1, size=rows)] = noisy[:, -1] = False
        keys = random.randint(kinds, size=(rows, pairs))
        asked = (~noisy[:, :-1] * random.random_sample((rows, pairs - 1))).argmax(1)  # any pair but noise and the last
        keys[:, -1] = keys[row, asked]
        first = first_places(np.where(noisy, kinds + np.arange(pairs), keys))
        values = kinds + np.take_along_axis(random.randint(kinds, size=(rows, pairs)), first, 1)
        tokens = np.stack([keys, values], 2)  # [rows, pairs, 2]
        filling = random.randint(2 * kinds, 2 * kinds + max(self.noise, 1), size=tokens.shape)
        tokens = np.where(noisy[:, :, None], filling, tokens)
        targets = np.full_like(tokens, IGNORED)
        targets[:, :, 0] = np.where(first < np.arange(pairs), values, IGNORED)
        return tokens.reshape(rows, -1), targets.reshape(rows, -1)

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        value_of, answers = {}, []
        for key, value in tokens.reshape(-1, 2):
            answers += [value_of.get(key, IGNORED), IGNORED]
            if key < self.answers:
                value_of[key] = value
        return np.array(answers)


@dataclass(frozen=True)
class NoisyRecall(InContextRecall):
    """In-context recall with noise between the pairs; otherwise as InContextRecall."""

    setting = "vocabulary 32 with 16 of noise, length 128, a share of 0.2 of noise, 12,800 rows, 200 epochs"
    vocab_size: int = 32
    noise: int = 16
    noise_share: float = 0.2


@dataclass(frozen=True)
class FuzzyRecall(Task):
    """In-context recall where keys and values have one to three tokens.

        a b | x | c | y z | a b | x         targets at the second b: x (the bars are not tokens)

    The tokens of a key are different ones, and of a value too. Scored are all tokens of the value of a key that was
    seen before; the last pair of a row is one. Padding stands in front. Key tokens have the ids from 0, then come value
    tokens and padding.

    Attributes:
        vocab_size: the tokens of keys and values, half each (one more for values if odd), and padding.
        longest_key, longest_value: most tokens of each.
        shortest_key: least tokens of a key; the paper tests with longest_key alone.
    """

    paper = f"{_MAD}; the paper trains on all tokens, ours on the answers"
    setting = "vocabulary 16, length 128, up to 3 tokens each; tested with keys of 3; 12,800 rows, 200 epochs"
    length: int = 128
    vocab_size: int = 16
    longest_key: int = 3
    longest_value: int = 3
    shortest_key: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 * (self.longest_key + self.longest_value)
        self.check(self.length >= least, f"length is {self.length}; the same pair twice may take {least}")
        self.check(1 <= self.shortest_key <= self.longest_key <= 3, "1 <= shortest_key <= longest_key <= 3 must hold")
        self.check(1 <= self.longest_value <= 3, f"longest_value is {self.longest_value}; it must be from 1 to 3")
        least = 2 * max(self.longest_key, self.longest_value) + 1
        self.check(least <= self.vocab_size <= 128, f"vocab_size is {self.vocab_size}; it must be from {least} to 128")

    @property
    def _key_tokens(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def answers(self) -> int:
        return self.vocab_size - 1 - self._key_tokens

    @cached_property
    def _keys(self) -> tuple[np.ndarray, np.ndarray]:
        return _motifs(self._key_tokens, self.longest_key)

    @cached_property
    def _values(self) -> tuple[np.ndarray, np.ndarray]:
        return _motifs(self.answers, self.longest_value)

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        (key_tokens, key_sizes), (value_tokens, value_sizes) = self._keys, self._values
        pairs, row = self.length // 2, np.arange(rows)[:, None]
        keys = _draw(random, key_sizes, self.shortest_key, (rows, pairs))
        drawn = _draw(random, value_sizes, 1, (rows, pairs))
        values = drawn[row, first_places(keys)]
        # As many pairs as leave room for one more, whatever its size, which is one of them again.
        sizes = (key_sizes[keys] + value_sizes[values]).cumsum(1)  # [rows, pairs]
        fitting = (sizes <= self.length - self.longest_key - self.longest_value).sum(1)
        keys[row[:, 0], fitting] = keys[row[:, 0], (random.random_sample(rows) * fitting).astype(int)]
        first = first_places(keys)
        keys, values = key_tokens[keys], value_tokens[drawn[row, first]]  # [rows, pairs, longest]
        tokens = np.concatenate([keys, np.where(values >= 0, self._key_tokens + values, -1)], 2)
        tokens[np.arange(pairs) > fitting[:, None]] = -1
        answers = np.arange(tokens.shape[2]) >= self.longest_key
        scored = (first < np.arange(pairs))[:, :, None] & answers
        return self._to_the_right(tokens.reshape(rows, -1), scored.reshape(rows, -1))

    def _to_the_right(self, tokens: np.ndarray, scored: np.ndarray) -> Rows:
        """Rows of tokens, those of -1 left out, moved to the end of `length` steps; targets at the steps before."""
        order = np.argsort(tokens >= 0, axis=1, kind="stable")[:, -self.length :]
        tokens, scored = np.take_along_axis(tokens, order, 1), np.take_along_axis(scored, order, 1)
        targets = unscored(*tokens.shape)
        targets[:, :-1] = np.where((scored & (tokens >= 0))[:, 1:], tokens[:, 1:], IGNORED)
        return np.where(tokens >= 0, tokens, self.vocab_size - 1), targets

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        value_of: dict[tuple, list] = {}
        answers = np.full(self.length, IGNORED)
        key: list[int] = []
        for step, token in enumerate(tokens):
            if token < self._key_tokens:  # a key begins, or goes on
                if step and tokens[step - 1] >= self._key_tokens:
                    key = []
                key.append(token)
            elif token < self.vocab_size - 1:
                if tokens[step - 1] < self._key_tokens:
                    known, value = value_of.get(tuple(key)), []
                    if known:
                        answers[step - 1 : step - 1 + len(known)] = known
                value.append(token)
                value_of[tuple(key)] = value
        return answers


def _motifs(tokens: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """All orders of one to `longest` different tokens, behind them -1, [motifs, longest], and their sizes [motifs]."""
    motifs = [order for size in range(1, longest + 1) for order in permutations(range(tokens), size)]
    filled = np.array([order + (-1,) * (longest - len(order)) for order in motifs])
    return filled, np.array([len(order) for order in motifs])


def _draw(random: np.random.RandomState, sizes: np.ndarray, shortest: int, shape: tuple[int, int]) -> np.ndarray:
    """Places of motifs: a size drawn evenly, then a motif of that size."""
    size = random.randint(shortest, sizes[-1] + 1, size=shape)
    first = np.searchsorted(sizes, np.arange(sizes[-1] + 2))
    return first[size] + (random.random_sample(shape) * (first[size + 1] - first[size])).astype(int)


@dataclass(frozen=True)
class Memorisation(Task):
    """Keys with values that no row tells; as they are the same in all rows and splits, they can be learnt by heart.

        k1 ? k2 ? k3 ?                      targets at the question signs: v1 v2 v3

    Keys have the ids from 0, then come values and, vocab_size - 1, the question sign.

    Attributes:
        facts: seed of the values of the keys.
    """

    paper = _MAD
    setting = "vocabulary 256, length 32, 256 rows, 200 epochs"
    length: int = 32
    vocab_size: int = 256
    facts: int = 12345

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.length % 2 == 0, f"length is {self.length}; it must be even")
        self.check(self.vocab_size >= 3, f"vocab_size is {self.vocab_size}; it must be at least 3")
        self.check(0 <= self.facts < 2**32, f"facts is {self.facts}; it must be from 0 to 2**32 - 1")

    @property
    def answers(self) -> int:
        return self.vocab_size // 2

    @cached_property
    def value_of(self) -> np.ndarray:
        """The value of each key."""
        keys = (self.vocab_size - 1) // 2
        return keys + np.random.RandomState(self.facts).permutation(self.answers)[:keys]

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        keys = random.randint(len(self.value_of), size=(rows, self.length // 2))
        tokens, targets = np.full((rows, self.length), self.vocab_size - 1), unscored(rows, self.length)
        tokens[:, ::2], targets[:, 1::2] = keys, self.value_of[keys]
        return tokens, targets

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        answers = []
        for step, token in enumerate(tokens):
            answers.append(self.value_of[tokens[step - 1]] if token == self.vocab_size - 1 else IGNORED)
        return np.array(answers)


@dataclass(frozen=True)
class Compression(Task):
    """Random tokens, a sign, and then questions for the token at each place.

        c a b ! 1 2 3                       targets at the questions: c a b

    Tokens have the ids from 0, then come the sign and the questions.

    Attributes:
        length: tokens and sign: a row has length - 1 more steps.
        vocab_size_of_text: ids of tokens and the sign.
    """

    paper = (
        f"{_MAD}; there a decoder of its own reads the places from the output at the sign alone. Here the model itself "
        "is asked: what a recurrent one has kept is in its state, but attention may look back past the sign"
    )
    setting = "vocabulary 16, length 32, 12,800 rows, 200 epochs"
    length: int = 32
    vocab_size_of_text: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.length >= 2, f"length is {self.length}; it must be at least 2")
        self.check(self.vocab_size_of_text >= 2, "vocab_size_of_text must be at least 2")

    @property
    def steps(self) -> int:
        return 2 * self.length - 1

    @property
    def vocab_size(self) -> int:
        return self.vocab_size_of_text + self.length - 1

    @property
    def answers(self) -> int:
        return self.vocab_size_of_text - 1

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        text = random.randint(self.answers, size=(rows, self.length - 1))
        behind = np.broadcast_to(np.arange(self.answers, self.vocab_size), (rows, self.length))  # sign and questions
        return np.concatenate([text, behind], 1), np.concatenate([unscored(rows, self.length), text], 1)

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        asked = [IGNORED if token <= self.answers else tokens[token - self.answers - 1] for token in tokens]
        return np.array(asked)
