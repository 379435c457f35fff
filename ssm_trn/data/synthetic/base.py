"""What all synthetic tasks share: a frozen description that draws its rows from (seed, split, step) and nothing else.

A row of a batch is one sequence. At each of its steps t the target is what a model should predict after it has read the
tokens up to t, or IGNORED where nothing is scored. Where the answers of a row are fed back, as in copying, they are
among its tokens; where a paper gives blanks instead, they are blanks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, get_type_hints

import numpy as np
import torch

from ssm_trn.config import check_types
from ssm_trn.data.datamodule import IGNORED, Batch

SPLITS = ("train", "validation", "test")
_MOST_STEPS = 2**22  # of a row: four times the longest that a paper of these tasks tests
_MOST_TOKENS = 2**27  # of a batch: 2 GiB
_MOST_IDS = 2**20

Rows = tuple[np.ndarray, np.ndarray]  # tokens and targets, int64 [rows, steps]


@dataclass(frozen=True)
class Task(ABC):
    """A task in one setting. The defaults of each task are the setting of its paper.

    Attributes:
        length: size of the task in its paper's terms: of the sequence, or of the string to copy.
        paper: where the task comes from, with what ours does otherwise.
        setting: the options of the paper's experiment, in words.
    """

    paper: ClassVar[str]
    setting: ClassVar[str]
    length: int

    def __post_init__(self) -> None:
        check_types(self._owner, vars(self), get_type_hints(type(self)))
        self.check(self.length >= 1, f"length is {self.length}; it must be at least 1")
        self.check(self.steps <= _MOST_STEPS, f"a row would have {self.steps} steps; choose a smaller length")
        self.check(self.vocab_size <= _MOST_IDS, f"it would have {self.vocab_size} ids; choose at most {_MOST_IDS}")

    @property
    def steps(self) -> int:
        """Steps of a row: all rows of the task have this many, so that shapes stay the same."""
        return self.length

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """How many ids a model needs to read and answer the task."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """Among how many tokens a guess is made at a scored step: it is right with a chance of 1 / answers."""

    @abstractmethod
    def sample(self, random: np.random.RandomState, rows: int) -> Rows:
        """Draws rows: tokens and targets."""

    @abstractmethod
    def solve(self, tokens: np.ndarray) -> np.ndarray:
        """The perfect oracle: from the tokens [steps] of one row alone, the target of each step that has one.

        Plain loops after the definition of the task, sharing nothing with `sample`. Steps that have an answer but are
        not scored may be answered too.
        """

    @classmethod
    def options(cls) -> list[str]:
        """The names of what can be set."""
        return [field.name for field in fields(cls)]

    def batch(self, split: str, step: int, rows: int = 64, seed: int = 0) -> Batch:
        """Batch `step` of a split: tokens and targets int64 [rows, steps], reset bool, True at a row's first step.

        Raises:
            ValueError: for an unknown split, or numbers below their least.
        """
        if split not in SPLITS:
            raise ValueError(f"there is no split '{split}': choose one of {', '.join(SPLITS)}")
        if rows < 1 or step < 0 or not 0 <= seed < 2**32:
            raise ValueError("rows must be at least 1, step at least 0, and seed from 0 to 2**32 - 1")
        self.check(rows * self.steps <= _MOST_TOKENS, f"{rows} rows of {self.steps} steps are too many: choose fewer")
        # RandomState, since numpy promises that its numbers never change; those of default_rng may with a release.
        random = np.random.RandomState([seed, SPLITS.index(split), step])
        return as_batch(*self.sample(random, rows))

    def check(self, fits: bool, message: str) -> None:
        """A ValueError with the name of the task in front, unless `fits`."""
        if not fits:
            raise ValueError(f"{self._owner}: {message}")

    @property
    def _owner(self) -> str:
        return f"the task {type(self).__name__}"

    def changed(self, **options: Any) -> Self:
        """The same task with other options; a ValueError names one that it does not have."""
        for name in options:
            known = ", ".join(self.options())
            self.check(name in self.options(), f"it has no option '{name}': it takes {known}")
        return replace(self, **options)


@dataclass(frozen=True)
class TaskOfManyLengths(Task):
    """A task whose rows may differ in length, with padding behind the shorter ones.

    Attributes:
        shortest: each row has a length drawn evenly from `shortest` to `length`; None: all have `length`.
    """

    shortest: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest is not None:
            fits = 1 <= self.shortest <= self.length
            self.check(fits, f"shortest is {self.shortest}; it must be from 1 to the length, {self.length}")

    def draw_lengths(self, random: np.random.RandomState, rows: int) -> np.ndarray:
        """A length for each row, [rows]."""
        return random.randint(self.shortest or self.length, self.length + 1, size=rows)


def as_batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    """Tensors of rows that each begin a sequence."""
    reset = torch.zeros(tokens.shape, dtype=torch.bool)
    reset[:, 0] = True
    return {
        "tokens": torch.from_numpy(tokens.astype(np.int64)),
        "targets": torch.from_numpy(targets.astype(np.int64)),
        "reset": reset,
    }


def unscored(rows: int, steps: int) -> np.ndarray:
    """Targets [rows, steps] without any."""
    return np.full((rows, steps), IGNORED, dtype=np.int64)


def distinct(random: np.random.RandomState, rows: int, count: int, among: int) -> np.ndarray:
    """In each row `count` different numbers below `among`, in random order, [rows, count]."""
    return top(random.random_sample((rows, among)), count)


def top(scores: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` highest scores of each row, the highest first, [rows, count]."""
    if count < scores.shape[1]:
        candidates = np.argpartition(-scores, count, axis=1)[:, :count]
    else:
        candidates = np.broadcast_to(np.arange(count), scores.shape)
    order = np.argsort(-np.take_along_axis(scores, candidates, 1), axis=1)
    return np.take_along_axis(candidates, order, 1)


def first_places(items: np.ndarray) -> np.ndarray:
    """For each item of each row the place in that row where it first stands, [rows, places]."""
    row = np.arange(len(items))[:, None]
    _, first, kind = np.unique((items + (items.max() + 1) * row).ravel(), return_index=True, return_inverse=True)
    return first[kind].reshape(items.shape) - row * items.shape[1]
