"""Synthetic tasks: what a kind of model can and cannot do, without text.

    task = synthetic.make("mqar", length=64, pairs=8)
    task.batch("train", step=0)        # {tokens, targets, reset}: the same whenever and wherever it is asked for

`SyntheticDataModule` trains on them; docs/synthetic/README.md lists them with the settings of their papers.
"""

import difflib
from typing import TYPE_CHECKING, Any

from ssm_trn.data.synthetic.base import SPLITS, Task
from ssm_trn.data.synthetic.copying import Copying, InductionHeads, Palindrome, SelectiveCopying
from ssm_trn.data.synthetic.mad import Compression, FuzzyRecall, InContextRecall, Memorisation, NoisyRecall
from ssm_trn.data.synthetic.recall import MultiQueryRecall, Needle
from ssm_trn.data.synthetic.state_tracking import ModularArithmetic, Parity, WordProblem

if TYPE_CHECKING:
    from ssm_trn.data.synthetic.datamodule import SyntheticDataModule

TASKS: dict[str, type[Task]] = {
    "mqar": MultiQueryRecall,
    "needle": Needle,
    "in_context_recall": InContextRecall,
    "noisy_recall": NoisyRecall,
    "fuzzy_recall": FuzzyRecall,
    "memorisation": Memorisation,
    "compression": Compression,
    "copying": Copying,
    "palindrome": Palindrome,
    "selective_copying": SelectiveCopying,
    "induction_heads": InductionHeads,
    "parity": Parity,
    "modular_arithmetic": ModularArithmetic,
    "word_problem": WordProblem,
}

__all__ = ["SPLITS", "TASKS", "SyntheticDataModule", "Task", "make"]


def make(task: str, **options: Any) -> Task:
    """A task by name, its options those of the paper where none are given.

    Raises:
        ValueError: for an unknown name or option, or a value that does not fit.
    """
    if task not in TASKS:
        close = difflib.get_close_matches(task, TASKS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown task '{task}'{hint}: choose one of {', '.join(TASKS)}")
    return TASKS[task]().changed(**options)


def __getattr__(name: str) -> Any:
    if name == "SyntheticDataModule":  # on first use: it imports Lightning, which takes seconds
        from ssm_trn.data.synthetic.datamodule import SyntheticDataModule

        return SyntheticDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
