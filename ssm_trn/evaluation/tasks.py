"""The tasks that a model can be tested on without a network.

Official ones: lm-eval's own definitions (prompt, metric, version), each included by a small YAML file that replaces
nothing but the source of the data: a file in a folder of benchmark files. Own ones: made from the held-out documents of
a prepared data folder, so that they need no download and fit any corpus.
"""

import difflib
import json
import os
import random
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import lm_eval.tasks
import yaml
from jinja2 import UndefinedError

from ssm_trn.data.token_file import held_out_documents
from ssm_trn.evaluation.runs import data_settings

BENCHMARKS_VARIABLE = "SSM_TRN_BENCHMARKS"
OWN_TASKS = ("true_ending", "word_order")
_ITEMS = 200
_SENTENCE_END = re.compile(r"""[.!?]["'\u201d\u2019)]*(?=\s)|\n""")  # abbreviations end some too early: no harm done
_TASK_FILES = Path(__file__).with_name("task_files")
_OFFICIAL = Path(lm_eval.tasks.__file__).parent

# Name of the task: lm-eval's definition, and the file in the benchmarks folder.
_BENCHMARKS = {
    "arc_challenge": ("arc/arc_challenge.yaml", "arc_challenge/test.jsonl"),
    "arc_easy": ("arc/arc_easy.yaml", "arc_easy/test.jsonl"),
    "boolq": ("super_glue/boolq/default.yaml", "boolq/validation.jsonl"),
    "copa": ("super_glue/copa/default.yaml", "copa/validation.jsonl"),
    "lambada_openai": ("lambada/lambada_openai.yaml", "lambada_openai/test.jsonl"),
    "piqa": ("piqa/piqa.yaml", "piqa/validation.jsonl"),
    "wikitext": ("wikitext/wikitext.yaml", "wikitext2_raw/test.jsonl"),
    "winogrande": ("winogrande/default.yaml", "winogrande/validation.jsonl"),
} | {
    f"blimp_{path.stem}": (f"blimp/{path.name}", f"blimp/{path.stem}.jsonl")
    for path in sorted(_OFFICIAL.glob("blimp/[!_]*.yaml"))
}
_GROUPS = {"blimp": ("blimp/_blimp.yaml", [name for name in _BENCHMARKS if name.startswith("blimp_")])}


def known_tasks() -> list[str]:
    """Names of the tasks that need no network; the 67 parts of blimp, blimp_*, are known besides."""
    return sorted([*OWN_TASKS, *_GROUPS, *(name for name in _BENCHMARKS if not name.startswith("blimp_"))])


def load_tasks(
    names: Sequence[str], *, data: str | Path | None = None, benchmarks: str | Path | None = None, online: bool = False
) -> dict:
    """Tasks by name, for `lm_eval.evaluate`.

    Args:
        names: of own and official tasks.
        data: prepared data folder whose held-out documents the own tasks are made from.
        benchmarks: folder with the files of the official tasks (see `known_tasks`); by default the environment variable
            SSM_TRN_BENCHMARKS.
        online: allow all tasks of lm-eval, with data from the Hugging Face hub where no benchmarks folder is given.

    Raises:
        ValueError: for an unknown task, or where a task needs a folder that is not given.
        FileNotFoundError: if the benchmarks folder lacks the file of a task.
    """
    benchmarks = benchmarks or os.environ.get(BENCHMARKS_VARIABLE)
    local = [name for name in names if name in _GROUPS or name in _BENCHMARKS] if benchmarks or not online else []
    for name in names:
        if not online and name not in local and name not in OWN_TASKS:
            raise ValueError(_unknown(name))
    if local and not benchmarks:
        raise ValueError(
            f"task '{local[0]}' needs its data file: name a folder of benchmark files with --benchmarks "
            f"or {BENCHMARKS_VARIABLE}, or allow the hub with --online"
        )
    with tempfile.TemporaryDirectory() as overlay:
        if local:
            write_overlay(Path(overlay), local, Path(benchmarks))
        manager = lm_eval.tasks.TaskManager(
            include_path=[_TASK_FILES, overlay],
            include_defaults=online,
            metadata={"data": str(data)} if data is not None else None,
        )
        try:
            return manager.load(list(names))
        except (UndefinedError, KeyError) as error:  # lm-eval makes a question of each task's first item here
            if not local:
                raise
            raise ValueError(
                f"a file in {benchmarks} lacks what its task needs ({error}), one of {', '.join(local)}: get it anew"
            ) from error


def tasks_in(benchmarks: Path) -> list[str]:
    """The official tasks whose data files are in a folder."""
    present = [name for name, (_, file) in _BENCHMARKS.items() if (benchmarks / file).is_file()]
    return present + [group for group, (_, members) in _GROUPS.items() if set(members) <= set(present)]


def write_overlay(overlay: Path, names: Iterable[str], benchmarks: Path) -> None:
    """Writes YAML files that include lm-eval's definitions of official tasks and take their data from local files."""
    for name in names:
        if name in _GROUPS:
            definition, members = _GROUPS[name]
            (overlay / f"{name}.yaml").write_text(yaml.safe_dump({"include": str(_OFFICIAL / definition)}))
            write_overlay(overlay, members, benchmarks)
            continue
        definition, file = _BENCHMARKS[name]
        path = (benchmarks / file).resolve()
        if not path.is_file():
            raise FileNotFoundError(
                f"task '{name}' needs {path}: put the file there, or name another folder with --benchmarks"
            )
        settings = {
            "include": str(_OFFICIAL / definition),
            "dataset_kwargs": {"file": str(path)},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
        }
        source = f"custom_dataset: !function {__name__}.read_benchmark\n"
        (overlay / f"{name}.yaml").write_text(yaml.safe_dump(settings) + source)


def read_benchmark(file: str, **_) -> dict:
    """The items of a JSON-lines file, as lm-eval takes them from a `custom_dataset` function."""
    with open(file, encoding="utf-8") as lines:
        try:
            items = [json.loads(line) for line in lines if line.strip()]
        except ValueError as error:
            raise ValueError(f"{file} is not a file of JSON lines ({error}): get it anew") from error
    if not items or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{file} has no items, or lines that are not items: get it anew")
    try:
        return _test_split(items)
    except (ValueError, TypeError) as error:  # pyarrow's own are these too
        raise ValueError(f"the items of {file} are not all alike ({error}): get it anew") from error


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


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, [*known_tasks(), *_BENCHMARKS], n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return (
        f"unknown task '{name}'{hint}: choose from bits_per_byte, {', '.join(known_tasks())}, "
        "or allow all tasks of lm-eval with --online"
    )
