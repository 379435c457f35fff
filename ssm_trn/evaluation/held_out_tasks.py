"""Tasks made from the held-out documents of a prepared data folder: they need no download and fit any corpus."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ssm_trn.data.token_file import held_out_documents
from ssm_trn.evaluation.runs import data_settings

_ITEMS = 200
_SENTENCE_END = re.compile(r"""[.!?]["'\u201d\u2019)]*(?=\s)|\n""")  # abbreviations end some too early: no harm done


def true_ending(data: str | None = None, pretrained: str | None = None, **_) -> dict:
    """Items of the task true_ending: with which of four endings does the sentence go on?

    A passage breaks off in the middle of a sentence. Beside the true ending stand the second halves of other sentences
    of the held-out text, those of a random hundred that are the most alike in length. What counts is how much likelier
    the passage makes an ending, log p(ending | passage) - log p(ending). That asks for the use of context, and models
    of two million parameters get about half of the items right; log p(ending | passage) alone mostly tells how common
    the words of an ending are, and leaves such models near chance.

    Args:
        data: the prepared data folder.
        pretrained: in its place a run folder, which tells it; lm-eval's command line passes what its model was made of.
    """
    generator = random.Random(0)
    places = _places(data, pretrained)
    items = []
    for place in _chosen(places, generator):
        beginning, ending = _halves(place.sentence)
        others = {_halves(other.sentence)[1] for other in generator.sample(places, min(100, len(places)))} - {ending}
        alike = sorted(others, key=lambda text: (abs(len(text) - len(ending)), text))
        items.append(_item(f"{place.passage} {beginning}", ending, alike[:3], generator))
    return _test_split(items)


def word_order(data: str | None = None, pretrained: str | None = None, **_) -> dict:
    """Items of the task word_order: which of four forms of a sentence is the true one, after the text before it?

    In each of the three others two neighbouring words have changed places. As all four have the same words and length,
    the answer rests on word order alone, which a model learns right after the frequencies of words: models of two
    million parameters get about 8 of 10 items right. Arguments as for `true_ending`.
    """
    generator = random.Random(0)
    places = [place for place in _places(data, pretrained) if len(_swaps(place.sentence)) >= 3]
    items = []
    for place in _chosen(places, generator):
        others = generator.sample(_swaps(place.sentence), 3)
        items.append(_item(place.passage, place.sentence, others, generator))
    return _test_split(items)


def _halves(sentence: str) -> tuple[str, str]:
    words = sentence.split(" ")
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def _swaps(sentence: str) -> list[str]:
    """The sentence with two neighbouring words exchanged, in all places.

    Neither with the first word nor with one that bears punctuation: a capital or a comma would tell.
    """
    words = sentence.split(" ")
    return [
        " ".join([*words[:i], words[i + 1], words[i], *words[i + 2 :]])
        for i in range(1, len(words) - 1)
        if (words[i] + words[i + 1]).isalpha() and words[i] != words[i + 1]
    ]


@dataclass(frozen=True)
class _Place:
    """A sentence of the held-out text and the passage that stands before it."""

    passage: str
    sentence: str


def _places(data: str | None, run_folder: str | None) -> list[_Place]:
    """Places where a sentence of 10 to 40 words follows a passage of whole sentences, of 40 words or little more."""
    if data is None and run_folder is not None:
        data = data_settings(run_folder).get("folder")
    if data is None:
        raise ValueError("the task is made from held-out text: name a prepared data folder with --data")
    places = []
    for document in held_out_documents(data):
        sentences = _sentences(document)
        for index, (begin, stop) in enumerate(sentences[1:]):
            end = sentences[index][1]
            before = (document[sentences[first][0] : end] for first in range(index, -1, -1))
            passage = next((text for text in before if len(text.split()) >= 40), None)
            sentence = document[begin:stop]
            if passage and document[end:begin] == " " and 10 <= len(sentence.split(" ")) <= 40:
                places.append(_Place(passage, sentence))
    return places


def _sentences(document: str) -> list[tuple[int, int]]:
    """Where the sentences of a document begin and end; none goes beyond its line."""
    ends = [match.end() for match in _SENTENCE_END.finditer(document)]
    spans = []
    for begin, end in pairwise([0, *ends, len(document)]):
        text = document[begin:end].strip()
        if text:
            begin = document.index(text, begin)
            spans.append((begin, begin + len(text)))
    return spans


def _chosen(places: Sequence[_Place], generator: random.Random) -> list[_Place]:
    if len({place.sentence for place in places}) < 4:
        raise ValueError("the held-out text is too short to make test items from: prepare more text")
    return generator.sample(places, min(_ITEMS, len(places)))


def _item(passage: str, truth: str, others: list[str], generator: random.Random) -> dict:
    choices = [truth, *others]
    generator.shuffle(choices)
    return {"passage": passage, "choices": choices, "label": choices.index(truth)}


def _test_split(items: list[dict]) -> dict:
    from datasets import Dataset

    return {"test": Dataset.from_list(items)}
