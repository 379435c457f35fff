"""Recall from text at lengths that are counted in the model's own tokens: a needle in a haystack, and key-value pairs.

Both are multiple choice by log-likelihood, which models too small to write a whole answer can do. Haystack, keys and
values are words of the held-out text, so that any corpus and tokenizer will do. A question with its longest choice and
BOS takes at most `length` tokens, and a few less. Ask the model with a max_length of at least that: a context that is
cut loses its beginning.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from ssm_trn.data.token_file import TOKENIZER_FILE, held_out_documents
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.evaluation.runs import data_settings

_ITEMS = 100
_TRIES = 20  # passages that may have too few words before the text is taken for unfit
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"[^\W\d_]+")


def needle(length: int, data: str | None = None, pretrained: str | None = None, **_) -> dict:
    """Items of ssm_needle_LENGTH: which of four words did a sentence name that stands somewhere in held-out text?

    The sentence is "The secret word of KEY is VALUE.", at an even spread of depths, and its beginning comes again at
    the end. All four are words of the text around it, so that only that sentence tells. It is RULER's first task
    (arXiv:2404.06654, section 3.1) with words in place of numbers, which small models hardly know.

    Args:
        length: tokens of a question with BOS and the longest choice.
        data: the prepared data folder.
        pretrained: the run folder with the tokenizer; it names the data folder too.
    """
    text, generator = _HeldOutText.of(data, pretrained), random.Random(0)
    return _test_split([_needle(text, length, number / (_ITEMS - 1), generator) for number in range(_ITEMS)])


def key_value(length: int, data: str | None = None, pretrained: str | None = None, **_) -> dict:
    """Items of ssm_key_value_LENGTH: lines "KEY: VALUE", then one of the keys again; which of four values is its own?

    The three others are values of other keys, so that only the key tells; the line stands at an even spread of depths.
    It is multi-query recall (Zoology, arXiv:2312.04927) in words. Arguments as for `needle`.
    """
    text, generator = _HeldOutText.of(data, pretrained), random.Random(0)
    return _test_split([_key_value(text, length, number / (_ITEMS - 1), generator) for number in range(_ITEMS)])


def _needle(text: "_HeldOutText", length: int, depth: float, generator: random.Random) -> dict:
    key = generator.choice(text.words)
    question = f"The secret word of {key} is"
    room = length - 1 - 2 * text.sizes([question])[0] - 2 * text.longest_word
    for _ in range(_TRIES):
        hay = text.passage(room, generator)
        present = sorted(set(_WORD.findall(" ".join(hay))).intersection(text.words) - {key})
        if len(present) >= 4:
            break
    else:
        raise ValueError(f"{length} tokens are too few for a needle in held-out text: choose a longer task")
    value, *others = generator.sample(present, 4)  # all of the text, so that only the needle tells
    place = round(depth * len(hay))
    passage = " ".join([*hay[:place], f"{question} {value}.", *hay[place:], question])
    return _item(passage, value, others, depth, generator)


def _key_value(text: "_HeldOutText", length: int, depth: float, generator: random.Random) -> dict:
    words = text.words
    keys = generator.sample(words, min(len(words), length // 4))  # a line has at least four tokens
    pairs = [(key, generator.choice(words)) for key in keys]
    sizes = accumulate(text.sizes(["{}: {}\n".format(*pair) for pair in pairs]))
    room = length - 1 - 2 * text.longest_word  # the key that is asked for, and a choice
    pairs = pairs[: sum(size <= room for size in sizes)]
    if len(pairs) == len(words):
        raise ValueError(f"{len(words)} words are too few for pairs of {length} tokens: prepare more held-out text")
    others = sorted({value for _, value in pairs})
    if len(others) < 4:
        raise ValueError(f"{length} tokens are too few for four pairs: choose a longer task")
    key, value = pairs[round(depth * (len(pairs) - 1))]
    others.remove(value)
    passage = "".join("{}: {}\n".format(*pair) for pair in pairs) + f"{key}:"
    return _item(passage, value, generator.sample(others, 3), depth, generator)


@dataclass
class _HeldOutText:
    """The held-out documents as the tasks need them, with the tokenizer that counts."""

    tokenizer: Tokenizer
    documents: list[str]

    @classmethod
    def of(cls, data: str | None, pretrained: str | None) -> "_HeldOutText":
        if data is None and pretrained is not None:
            data = data_settings(pretrained).get("folder")
        if data is None:
            raise ValueError("the task is made from held-out text: name a prepared data folder with --data")
        own = Path(pretrained or data) / TOKENIZER_FILE
        tokenizer = Tokenizer.load(own if own.is_file() else Path(data) / TOKENIZER_FILE)
        return cls(tokenizer, list(held_out_documents(data)))

    @cached_property
    def words(self) -> list[str]:
        """Its words of 4 to 8 small letters, in the order of the alphabet."""
        found = {word for document in self.documents for word in _WORD.findall(document)}
        words = sorted(word for word in found if 4 <= len(word) <= 8 and word == word.lower())
        if len(words) < 8:
            raise ValueError(f"the held-out text has {len(words)} words of 4 to 8 letters: prepare more text")
        return words

    @cached_property
    def sentences(self) -> list[tuple[str, int]]:
        """Its sentences, one document after the other, each with its size."""
        parts = (part.strip() for document in self.documents for part in _SENTENCE_ENDS.split(document))
        sentences = [part for part in parts if part]
        return list(zip(sentences, self.sizes(sentences), strict=True))

    @cached_property
    def longest_word(self) -> int:
        """Most tokens that one of `words` takes with what may stand beside it."""
        return max(self.sizes([form.format(word) for word in self.words for form in ("{}", "{}.", "{}:")]))

    def sizes(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has, alone or behind a space, whichever are more."""
        alone, behind = (self.tokenizer.encode_batch([space + text for text in texts]) for space in ("", " "))
        return [max(map(len, pair)) for pair in zip(alone, behind, strict=True)]

    def passage(self, tokens: int, generator: random.Random) -> list[str]:
        """Sentences that follow one another, the first without its beginning, so that there are just so many tokens."""
        end, passage, left = generator.randrange(len(self.sentences)), [], tokens
        for number in range(len(self.sentences)):
            sentence, size = self.sentences[end - number]
            if size > left:
                words = sentence.split()
                ends = [" ".join(words[first:]) for first in range(1, len(words))]
                too_long = sum(size > left for size in self.sizes(ends))
                return ends[too_long : too_long + 1] + passage
            passage.insert(0, sentence)
            left -= size
        raise ValueError(f"the held-out text is shorter than a haystack of {tokens} tokens: prepare more text")


def _item(passage: str, truth: str, others: Sequence[str], depth: float, generator: random.Random) -> dict:
    choices = [truth, *others]
    generator.shuffle(choices)
    return {"passage": passage, "choices": choices, "label": choices.index(truth), "depth": depth}


def _test_split(items: list[dict]) -> dict:
    from datasets import Dataset

    return {"test": Dataset.from_list(items)}
