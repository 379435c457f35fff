"""Tasks that ask for a state: parity, arithmetic modulo a number, and products of permutations."""

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from ssm_trn.data.datamodule import IGNORED
from ssm_trn.data.synthetic.base import Rows, Task, TaskOfManyLengths, unscored


@dataclass(frozen=True)
class Parity(TaskOfManyLengths):
    """Bits: is the number of ones odd?

        1 0 1 1                             target at the last bit: 1; of every_step: 1 1 0 1

    Padding has the id 2.

    Attributes:
        every_step: score each bit instead of the last one only.
    """

    paper = "Negative eigenvalues, arXiv:2411.12537, section 5.1, after Deletang et al., arXiv:2207.02098"
    setting = "trained at lengths of 3 to 40, tested at 40 to 256; 20,000 steps of 256 rows"
    vocab_size = 3
    answers = 2
    length: int = 40
    every_step: bool = False

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        bits = random.randint(2, size=(rows, self.length))
        lengths, step = self.draw_lengths(random, rows)[:, None], np.arange(self.length)
        scored = step < lengths if self.every_step else step == lengths - 1
        return np.where(step < lengths, bits, 2), np.where(scored, bits.cumsum(1) % 2, IGNORED)

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        answers, ones = [], 0
        for token in tokens:
            ones += token == 1
            answers.append(ones % 2 if token != 2 else IGNORED)
        return np.array(answers)


PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS, PADDING = range(7)  # behind the digits


@dataclass(frozen=True)
class ModularArithmetic(TaskOfManyLengths):
    """An expression over the digits below `modulus`, and at the sign = its value modulo that.

        2 - 3 * 2 =          target at the end, modulo 5: 1
        ( 2 - ( - 4 ) ) =    with brackets: 1

    Without brackets * binds before + and -, and expressions have an odd number of tokens: one token less where `length`
    would make it even. Digits have the ids from 0, then come + - * ( ) = and padding.

    Attributes:
        length: of the expression with its =.
        brackets: nested expressions, each operation in brackets, and single digits with a sign or brackets.
        times: whether * occurs.
    """

    paper = "Negative eigenvalues, arXiv:2411.12537, section 5.1, after Deletang et al., arXiv:2207.02098"
    setting = "modulus 5; with brackets without times; trained at lengths of 3 to 40, tested at 40 to 256"
    length: int = 40
    modulus: int = 5
    brackets: bool = False
    times: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.modulus >= 2, f"modulus is {self.modulus}; it must be at least 2")
        shortest = self.length if self.shortest is None else self.shortest
        self.check(shortest >= 2, f"length and shortest must be at least 2, a digit and =, not {shortest}")

    @property
    def vocab_size(self) -> int:
        return self.modulus + 7

    @property
    def answers(self) -> int:
        return self.modulus

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        lengths = self.draw_lengths(random, rows) - 1  # of the expressions alone
        if not self.brackets:
            lengths -= 1 - lengths % 2
        tokens = np.full((rows, self.length), self.modulus + PADDING)
        values = self._nested(random, tokens, lengths) if self.brackets else self._flat(random, tokens, lengths)
        row, targets = np.arange(rows), unscored(rows, self.length)
        tokens[row, lengths], targets[row, lengths] = self.modulus + EQUALS, values % self.modulus
        return tokens, targets

    def _flat(self, random: np.random.RandomState, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Writes digits with operations between into each row and returns the values."""
        operations = random.randint(3 if self.times else 2, size=tokens.shape)
        digits = random.randint(self.modulus, size=tokens.shape)
        drawn = np.where(np.arange(self.length) % 2, self.modulus + operations, digits)
        np.copyto(tokens, drawn, where=np.arange(self.length) < lengths[:, None])
        total, term = np.zeros_like(lengths), digits[:, 0]  # the value is total + term
        for step in range(2, self.length, 2):
            operation, digit, inside = operations[:, step - 1], digits[:, step], step < lengths
            total = np.where(inside & (operation != TIMES), total + term, total)
            new = np.choose(operation, [digit, -digit, term * digit % self.modulus])
            term = np.where(inside, new, term)
        return total + term

    def _nested(self, random: np.random.RandomState, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Writes a nested expression into each row and returns the values.

        Level by level: each node of `size` 5 or more is ( left operation right ), the size of left drawn evenly; the
        values are then put together from the innermost level outwards.
        """
        row, start, size = np.arange(len(lengths)), np.zeros_like(lengths), lengths
        levels = []
        while len(row):
            split = size >= 5
            leaf, digit = ~split, random.randint(self.modulus, size=len(row))
            negative = leaf & (size % 2 == 0)  # sizes: 1 d, 2 -d, 3 (d), 4 (-d)
            end = start + size - 1
            bracketed = size >= 3
            for where, place, token in ((bracketed, start, OPEN), (bracketed, end, CLOSE)):
                tokens[row[where], place[where]] = self.modulus + token
            place = start + bracketed
            tokens[row[negative], place[negative]] = self.modulus + MINUS
            place = place + negative
            tokens[row[leaf], place[leaf]] = digit[leaf]
            row, start, size = row[split], start[split], size[split]
            left = 1 + (random.random_sample(len(row)) * (size - 4)).astype(int)
            operation = random.randint(3 if self.times else 2, size=len(row))
            tokens[row, start + 1 + left] = self.modulus + operation
            levels.append((np.where(negative, -digit, digit), split, operation))
            row, start = np.tile(row, 2), np.concatenate([start + 1, start + 2 + left])
            size = np.concatenate([left, size - 3 - left])
        values = np.zeros(0, int)
        for leaves, split, operation in reversed(levels):
            left, right = values[: len(operation)], values[len(operation) :]
            values = leaves
            values[split] = np.choose(operation, [left + right, left - right, left * right]) % self.modulus
        return values

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        end = list(tokens).index(self.modulus + EQUALS)
        answers = np.full(self.length, IGNORED)
        answers[end] = _value([token - self.modulus for token in tokens[:end]], self.modulus)
        return answers


def _value(symbols: list[int], modulus: int) -> int:
    """The value of an expression whose digits d are given as d - modulus; takes the symbols it reads off the list.

    expression = product {("+" | "-") product};  product = factor {"*" factor}
    """
    total, sign = 0, 1
    while True:
        product = sign * _factor(symbols, modulus)
        while symbols and symbols[0] == TIMES:
            symbols.pop(0)
            product *= _factor(symbols, modulus)
        total += product
        if not symbols or symbols[0] == CLOSE:
            return total % modulus
        sign = 1 if symbols.pop(0) == PLUS else -1


def _factor(symbols: list[int], modulus: int) -> int:
    """factor = digit | "-" factor | "(" expression ")"."""
    symbol = symbols.pop(0)
    if symbol == MINUS:
        return -_factor(symbols, modulus)
    if symbol != OPEN:
        return symbol + modulus
    value = _value(symbols, modulus)
    symbols.pop(0)  # the bracket that closes
    return value


_GROUPS = {"S3": (3, False), "A4": (4, True), "S4": (4, False), "A5": (5, True), "S5": (5, False)}


@dataclass(frozen=True)
class WordProblem(Task):
    """Permutations one after the other: the target at each step is the product of those so far.

        g1 g2 g3                            targets: g1, g2 g1, g3 g2 g1

    Each permutation is applied to what the ones before have made of the order 1 2 3 ... Ids are the permutations in the
    order of itertools.permutations; with fillers one more, for the steps without a permutation.

    Attributes:
        group: S3, S4, S5 (all permutations of so many things), A4 or A5 (the even ones).
        moved: permutations drawn move at most so many things (2: swaps and the one that moves nothing); None: all.
        fillers: steps behind each permutation, the last of which is scored in its place.
    """

    paper = "Merrill et al., arXiv:2404.08819, section 6; swaps and fillers: arXiv:2411.12537, section 5.2"
    setting = (
        "A5, A4 x Z5 and Z60 at lengths of up to 25; S5 trained at 32 and tested beyond, all, moved 2, or fillers 3"
    )
    length: int = 32
    group: str = "S5"
    moved: int | None = None
    fillers: int = 0

    def __post_init__(self) -> None:
        self.check(self.group in _GROUPS, f"group is '{self.group}'; choose one of {', '.join(_GROUPS)}")
        self.check(self.fillers >= 0, f"fillers is {self.fillers}; it must be at least 0")
        super().__post_init__()
        enough = self.moved is None or len(self.drawn) > 1
        self.check(enough, f"moved is {self.moved}; it must be at least {3 if self.group[0] == 'A' else 2}")

    @property
    def steps(self) -> int:
        return self.length * (1 + self.fillers)

    @property
    def vocab_size(self) -> int:
        return len(self.elements) + (self.fillers > 0)

    @property
    def answers(self) -> int:
        return len(self.elements)

    @cached_property
    def elements(self) -> np.ndarray:
        """The permutations of the group by id, [elements, things]."""
        things, even = _GROUPS[self.group]
        everything = np.array(list(permutations(range(things))))
        inversions = sum(everything[:, i] > everything[:, j] for i in range(things) for j in range(i + 1, things))
        return everything[inversions % 2 == 0] if even else everything

    @cached_property
    def drawn(self) -> np.ndarray:
        """The ids that rows are drawn from."""
        moves = (self.elements != np.arange(self.elements.shape[1])).sum(1)
        return np.flatnonzero(moves <= (self.elements.shape[1] if self.moved is None else self.moved))

    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        base = len(self.elements[0]) ** np.arange(len(self.elements[0]))
        ids = np.empty(base.sum() * len(base), int)
        ids[self.elements @ base] = np.arange(len(self.elements))  # the id of a permutation by its digits
        word = self.drawn[random.randint(len(self.drawn), size=(rows, self.length))]
        state, products = np.arange(len(base))[None].repeat(rows, 0), np.empty_like(word)
        for step in range(self.length):
            state = np.take_along_axis(self.elements[word[:, step]], state, 1)
            products[:, step] = ids[state @ base]
        tokens = np.full((rows, self.length, 1 + self.fillers), len(self.elements))
        targets = np.full_like(tokens, IGNORED)
        tokens[:, :, 0], targets[:, :, -1] = word, products
        return tokens.reshape(rows, -1), targets.reshape(rows, -1)

    def solve(self, tokens: np.ndarray) -> np.ndarray:
        names = [tuple(element) for element in self.elements]
        state, answers = list(range(len(names[0]))), []
        for token in tokens[:: 1 + self.fillers]:
            state = [names[token][thing] for thing in state]
            answers += [IGNORED] * self.fillers + [names.index(tuple(state))]
        return np.array(answers)
