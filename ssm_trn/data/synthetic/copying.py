"""Tokens to be told again: in their order, backwards, from among noise, or the one behind a sign."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ssm_trn.data.datamodule import IGNORED
from ssm_trn.data.synthetic.base import Rows, Task, TaskOfManyLengths, top, unscored


@dataclass(frozen=True)
class Copying(TaskOfManyLengths):
    """A string of random letters, then the same once more, up to its end sign.

        <begin> c a b <again> c a b         targets from <again> on: c a b <end>

    Letters have the ids from 0, then come begin, again, end and padding.

    Attributes:
        length: of the string: a row has 2 length + 2 steps.
        letters: how many there are.
    """

    paper = "Repeat after me, arXiv:2402.01032, section 3; the paper packs several strings into a row"
    setting = "26 letters; strings of up to 300, or trained to 50 and tested to 1,000"
    backwards: ClassVar[bool] = False
    length: int = 300
    letters: int = 26

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.letters >= 1, f"letters is {self.letters}; it must be at least 1")

    @property
    def steps(self) -> int:
        return 2 * self.length + 2

    @property
    def vocab_size(self) -> int:
        return self.letters + 4

    @property
    def answers(self) -> int:
        return self.letters

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        begin, again, end, padding = range(self.letters, self.letters + 4)
        lengths = self.draw_lengths(random, rows)[:, None]  # [rows, 1]
        strings = random.randint(self.letters, size=(rows, self.length))
        step = np.arange(self.steps)[None]
        place = step - lengths - 2  # of the step's letter in the second string
        source = lengths - 1 - place if self.backwards else place
        echoed = np.take_along_axis(strings, np.clip(source, 0, self.length - 1), 1)
        first = strings[:, np.clip(step[0] - 1, 0, self.length - 1)]
        second = (place >= 0) & (place < lengths)
        tokens = np.select(
            [step == 0, step <= lengths, step == lengths + 1, second], [begin, first, again, echoed], padding
        )
        following = np.pad(np.where(second, echoed, end)[:, 1:], ((0, 0), (0, 1)), constant_values=end)
        return tokens, np.where((place >= -1) & (place < lengths), following, IGNORED)

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        again = list(tokens).index(self.letters + 1)
        told = list(tokens[1:again])
        told = (told[::-1] if self.backwards else told) + [self.letters + 2]
        return np.array([IGNORED] * again + told + [IGNORED] * (self.steps - again - len(told)))


@dataclass(frozen=True)
class Palindrome(Copying):
    """A string of random letters, then the same backwards; otherwise as Copying."""

    paper = "Kimi Linear, arXiv:2510.26692, synthetic tests; the vocabulary is ours"
    setting = "lengths of 256 to 2,048 tokens; 2 layers of 2 heads of size 128"
    backwards: ClassVar[bool] = True
    length: int = 255


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Some tokens stand among noise; at the end they are to be told in their order.

        . c . . a . b ! ! !                 targets at the signs: c a b      (cue "signs", Mamba)
        . c . . a . b ! . . .               targets at the last noise: c a b (cue "sign", MAD)

    Noise is 0, the sign vocab_size - 1, tokens are between. Their places are drawn evenly.

    Attributes:
        count: tokens to be told.
        cue: "signs": a sign for each answer; "sign": one sign, then noise.
    """

    paper = "Mamba, arXiv:2312.00752, table 1 (cue signs); MAD, arXiv:2403.17844, section 3.1 (cue sign)"
    setting = "length 4,096, vocabulary 16, 16 tokens, 400,000 steps of 64 rows; MAD: length 256, 12,800 rows"
    length: int = 4096
    count: int = 16
    vocab_size: int = 16
    cue: str = "signs"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.cue in ("signs", "sign"), f"cue is '{self.cue}'; it must be signs or sign")
        self.check(self.count >= 1, f"count is {self.count}; it must be at least 1")
        least = 2 * self.count + (self.cue == "sign")
        self.check(self.length >= least, f"length is {self.length}; {self.count} tokens need at least {least}")
        self.check(self.vocab_size >= 3, f"vocab_size is {self.vocab_size}; noise, sign and tokens need at least 3")

    @property
    def answers(self) -> int:
        return self.vocab_size - 2

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        told, sign = self.length - self.count, self.vocab_size - 1
        noisy = told - (self.cue == "sign")
        places = np.sort(top(random.random_sample((rows, noisy)), self.count), axis=1)
        values = random.randint(1, sign, size=(rows, self.count))
        tokens, targets = np.zeros((rows, self.length), np.int64), unscored(rows, self.length)
        np.put_along_axis(tokens, places, values, 1)
        tokens[:, noisy : self.length if self.cue == "signs" else told] = sign
        targets[:, told:] = values
        return tokens, targets

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        sign = self.vocab_size - 1
        found = [token for token in tokens if token not in (0, sign)]
        first_answer = list(tokens).index(sign) + (self.cue == "sign")
        return np.array([IGNORED] * first_answer + found)


@dataclass(frozen=True)
class InductionHeads(Task):
    """Random tokens with a sign among them; the sign comes again at the end: what stood behind it the first time?

        x x ! a x x x x !                   target at the end: a

    The sign is vocab_size - 1.
    """

    paper = "Mamba, arXiv:2312.00752, section 4.1 and appendix E.1"
    setting = "trained at 256, tested at 64 to 1,048,576; vocabulary 16; 2 layers, d_model 64; batches of 8"
    length: int = 256
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.length >= 3, f"length is {self.length}; it must be at least 3")
        self.check(self.vocab_size >= 2, f"vocab_size is {self.vocab_size}; it must be at least 2")

    @property
    def answers(self) -> int:
        return self.vocab_size - 1

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        sign = self.vocab_size - 1
        tokens, targets = random.randint(sign, size=(rows, self.length)), unscored(rows, self.length)
        place, row = random.randint(self.length - 2, size=rows), np.arange(rows)
        tokens[row, place], tokens[:, -1] = sign, sign
        targets[:, -1] = tokens[row, place + 1]
        return tokens, targets

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        answers = np.full(self.length, IGNORED)
        answers[-1] = tokens[list(tokens).index(self.vocab_size - 1) + 1]
        return answers
