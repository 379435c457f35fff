"""Benchmark data from a folder of files in place of the Hugging Face hub.

A task of lm-eval stays as it is defined there (prompt, metric, version): nothing but the place of its data is replaced.
The table below says which file holds which split of which data set: JSON objects, one a line, with the hub's columns.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BENCHMARKS_VARIABLE = "SSM_TRN_BENCHMARKS"

# A definition's dataset_path and dataset_name: the file of a split.
_FILES: dict[tuple[str, str | None], str] = {
    ("allenai/ai2_arc", "ARC-Challenge"): "arc_challenge/{split}.jsonl",
    ("allenai/ai2_arc", "ARC-Easy"): "arc_easy/{split}.jsonl",
    ("allenai/winogrande", "winogrande_xl"): "winogrande/{split}.jsonl",
    ("aps/super_glue", "boolq"): "boolq/{split}.jsonl",
    ("aps/super_glue", "copa"): "copa/{split}.jsonl",
    ("baber/piqa", None): "piqa/{split}.jsonl",
    ("EleutherAI/lambada_openai", "default"): "lambada_openai/{split}.jsonl",
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): "wikitext2_raw/{split}.jsonl",
    ("jannalu/crows_pairs_multilingual", "english"): "crows_pairs/{split}.jsonl",
    ("openai/gsm8k", "main"): "gsm8k/{split}.jsonl",
}
_FILES_OF_ANY_NAME = {"cambridgeltl/xcopa": "xcopa/{name}.{split}.jsonl", "nyu-mll/blimp": "blimp/{name}.jsonl"}

# Data sets that are not the hub's to the letter where they are had as files.
NEAR = {
    "EleutherAI/wikitext_document_level": "its file lacks 286 of 1,290,590 bytes, all white space: comparable to 1e-3",
    "jannalu/crows_pairs_multilingual": "its file is the first release (1,508 pairs), the task's data a later one",
    "openai/gsm8k": "its few-shot examples come from 1,000 of the 7,473 training items",
}
_NOT_IN_FILES = "crows_pairs_english_autre"  # the first release has no pairs of this kind


def benchmarks_folder(folder: str | Path | None) -> Path | None:
    """The folder of that name, by default the one that SSM_TRN_BENCHMARKS names; None where neither does.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    folder = folder or os.environ.get(BENCHMARKS_VARIABLE)
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}: name one of benchmark files with --benchmarks or {BENCHMARKS_VARIABLE}"
        )
    return Path(folder).resolve()


def needed_files(definition: Mapping[str, Any]) -> dict[str, str]:
    """By split, the files without which a task cannot be scored, relative to the folder; empty for other data sets."""
    scored = definition.get("test_split") or definition.get("validation_split")
    examples = definition.get("fewshot_split") if definition.get("num_fewshot") else None
    return {split: file for split, file in _files(definition).items() if split in (scored, examples)}


def local_source(definition: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The entries of a task's definition that make it read files; empty where the folder lacks one that it needs.

    Splits whose file is not there are as if the data set had none.
    """
    needed = needed_files(definition)
    if folder is None or not needed or missing_files(definition, folder):
        return {}
    files = {split: str(folder / file) for split, file in _files(definition).items() if (folder / file).is_file()}
    absent = {key: None for key in _SPLITS if definition.get(key) not in files}
    alias = {"task_alias": f"{definition['task']} (near)"} if definition["dataset_path"] in NEAR else {}
    return {"custom_dataset": read_benchmark, "dataset_kwargs": {"files": files}, **absent, **alias}


def missing_files(definition: Mapping[str, Any], folder: Path) -> list[str]:
    """The files that a task needs and the folder lacks."""
    return [file for file in needed_files(definition).values() if not (folder / file).is_file()]


def read_benchmark(files: Mapping[str, str], **_) -> dict:
    """The items of JSON-lines files by split, as lm-eval takes them from a `custom_dataset` function.

    Raises:
        ValueError: for a file that is empty, is not JSON lines, or has items of different kinds.
    """
    from datasets import Dataset

    splits = {}
    for split, file in files.items():
        with open(file, encoding="utf-8") as lines:
            try:
                items = [json.loads(line) for line in lines if line.strip()]
            except ValueError as error:
                raise ValueError(f"{file} is not a file of JSON lines ({error}): get it anew") from error
        if not items or not all(isinstance(item, dict) for item in items):
            raise ValueError(f"{file} has no items, or lines that are not items: get it anew")
        try:
            splits[split] = Dataset.from_list(items)
        except (ValueError, TypeError) as error:  # pyarrow's own are these too
            raise ValueError(f"the items of {file} are not all alike ({error}): get it anew") from error
    return splits


_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


def _files(definition: Mapping[str, Any]) -> dict[str, str]:
    path, name = definition.get("dataset_path"), definition.get("dataset_name")
    pattern = _FILES.get((path, name)) or _FILES_OF_ANY_NAME.get(path)
    if definition.get("task") == _NOT_IN_FILES:
        return {}
    splits = filter(None, map(definition.get, _SPLITS)) if pattern else ()
    return {split: pattern.format(name=name, split=split) for split in splits}
