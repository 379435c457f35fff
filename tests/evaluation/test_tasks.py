import json
import os
import random
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks._yaml_loader import load_yaml

from ssm_trn.data import held_out_documents
from ssm_trn.evaluation import tasks
from ssm_trn.evaluation.tasks import known_tasks, load_tasks
from tests.evaluation.samples import ARC, SAMPLES

OFFICIAL = Path(lm_eval.tasks.__file__).parent
BENCHMARKS = Path(__file__).parents[2].parent / "shared" / "data" / "benchmarks"


def test_official_tasks_differ_from_lm_eval_in_their_data_alone(benchmarks):
    loaded = load_tasks([name for name in known_tasks() if name not in tasks.OWN_TASKS], benchmarks=benchmarks)
    assert len(loaded["tasks"]) == 67 + len(SAMPLES)
    folders = ("arc", "blimp", "lambada", "piqa", "super_glue/boolq", "super_glue/copa", "wikitext", "winogrande")
    definitions = [load_yaml(path) for folder in folders for path in OFFICIAL.glob(f"{folder}/**/*.yaml")]
    theirs = {definition.get("task"): definition for definition in definitions if "group" not in definition}
    source = {"dataset_path", "dataset_name", "training_split", "validation_split", "test_split", "tag", "metadata"}
    for name, task in loaded["tasks"].items():
        ours = task.config.to_dict(keep_callable=True)
        for key in theirs[name].keys() - source:
            assert ours[key] == theirs[name][key], (name, key)
        assert ours["metadata"]["version"] == theirs[name]["metadata"]["version"]
        assert len(task.eval_docs) == 3
    assert dict(loaded["tasks"]["arc_easy"].eval_docs[0]) == ARC
    [group] = loaded["groups"].values()
    assert (group.name, len(group.child_names)) == ("blimp", 67)


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the folder of whole benchmark files is not here")
def test_whole_benchmark_files_have_the_published_number_of_items():
    items = {"lambada_openai": 5153, "piqa": 1838, "winogrande": 1267, "arc_easy": 2376, "arc_challenge": 1172}
    items |= {"boolq": 3270, "copa": 100, "wikitext": 62, "blimp_wh_island": 1000}
    loaded = load_tasks(list(items), benchmarks=BENCHMARKS)
    assert {name: len(task.eval_docs) for name, task in loaded["tasks"].items()} == items


def test_benchmarks_folder_may_come_from_the_environment(benchmarks, monkeypatch):
    monkeypatch.setenv("SSM_TRN_BENCHMARKS", benchmarks)
    assert list(load_tasks(["piqa"])["tasks"]) == ["piqa"]


def test_wrong_names_and_folders_are_told_in_a_sentence(benchmarks, tmp_path, monkeypatch):
    monkeypatch.delenv("SSM_TRN_BENCHMARKS", raising=False)
    with pytest.raises(ValueError, match=r"unknown task 'arc_eazy' \(did you mean arc_easy\?\).* blimp,.*--online"):
        load_tasks(["arc_eazy"], benchmarks=benchmarks)
    with pytest.raises(ValueError, match="task 'piqa' needs its data file.*--benchmarks or SSM_TRN_BENCHMARKS"):
        load_tasks(["piqa"])
    missing = os.path.join(tmp_path, "blimp", "adjunct_island.jsonl")
    with pytest.raises(FileNotFoundError, match=f"'blimp_adjunct_island' needs {missing}.*--benchmarks"):
        load_tasks(["blimp"], benchmarks=str(tmp_path))
    (tmp_path / "copa").mkdir()
    (tmp_path / "copa" / "validation.jsonl").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="validation.jsonl is not a file of JSON lines"):
        load_tasks(["copa"], benchmarks=str(tmp_path))
    for content in ("", "\n", "[1]\n"):
        (tmp_path / "copa" / "validation.jsonl").write_text(content)
        with pytest.raises(ValueError, match="validation.jsonl has no items, or lines that are not items"):
            load_tasks(["copa"], benchmarks=str(tmp_path))
    (tmp_path / "copa" / "validation.jsonl").write_text('{"premise": "a"}\n{"premise": 1}\n')
    with pytest.raises(ValueError, match="validation.jsonl are not all alike"):
        load_tasks(["copa"], benchmarks=str(tmp_path))
    (tmp_path / "arc_easy").mkdir()
    for task, file in (("copa", "copa/validation.jsonl"), ("arc_easy", "arc_easy/test.jsonl")):
        (tmp_path / file).write_text('{"passage": "of another task"}\n')
        with pytest.raises(ValueError, match=f"lacks what its task needs .*, one of {task}: get it anew"):
            load_tasks([task], benchmarks=str(tmp_path))
    with pytest.raises(ValueError, match="made from held-out text.*--data"):
        load_tasks(["true_ending"])


def test_hub_tasks_are_known_online(monkeypatch, benchmarks):
    seen = {}

    class Manager:
        def __init__(self, include_path, include_defaults, metadata):
            seen["defaults"] = include_defaults
            seen["local"] = [path.stem for folder in include_path[1:] for path in Path(folder).iterdir()]

        def load(self, names):
            return names

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Manager)
    monkeypatch.delenv("SSM_TRN_BENCHMARKS", raising=False)
    assert load_tasks(["hellaswag", "piqa"], online=True) == ["hellaswag", "piqa"]
    assert seen == {"defaults": True, "local": []}
    load_tasks(["hellaswag", "piqa"], online=True, benchmarks=benchmarks)
    assert seen == {"defaults": True, "local": ["piqa"]}


def items_of(name: str, data: str) -> list[dict]:
    return list(load_tasks([name], data=data)["tasks"][name].eval_docs)


@pytest.mark.parametrize("name", tasks.OWN_TASKS)
def test_own_items_have_four_choices_of_which_one_is_in_the_text(name, data):
    documents = list(held_out_documents(data))
    items = items_of(name, data)
    assert len(items) >= 40
    assert {item["label"] for item in items} == {0, 1, 2, 3}
    for item in items:
        assert len(set(item["choices"])) == 4
        assert len(item["passage"].split()) >= 40
        continued = [f"{item['passage']} {choice}" for choice in item["choices"]]
        assert [any(text in document for document in documents) for text in continued] == [
            position == item["label"] for position in range(4)
        ]
    assert items_of(name, data) == items


def test_endings_are_alike_in_length_and_come_from_the_text(data):
    whole = "\n".join(held_out_documents(data))
    for item in items_of("true_ending", data):
        lengths = [len(choice) for choice in item["choices"]]
        assert max(lengths) < 1.6 * min(lengths)
        assert all(choice in whole for choice in item["choices"])


def test_word_orders_are_one_exchange_of_neighbours_away(data):
    for item in items_of("word_order", data):
        truth = item["choices"].pop(item["label"]).split(" ")
        for choice in (choice.split(" ") for choice in item["choices"]):
            moved = [i for i, (a, b) in enumerate(zip(truth, choice, strict=True)) if a != b]
            first, second = moved
            assert second == first + 1
            assert (truth[first], truth[second]) == (choice[second], choice[first])
            assert first > 0
            assert second < len(truth) - 1 or truth[second].isalpha()


def test_sentences_do_not_cross_lines_and_take_linear_time():
    document = 'A title\n\nOne is "free." Two (2)! Is it? Yes: 3.5 of it\nend'
    spans = tasks._sentences(document)
    assert [document[a:b] for a, b in spans] == [
        "A title",
        'One is "free."',
        "Two (2)!",
        "Is it?",
        "Yes: 3.5 of it",
        "end",
    ]
    assert len(tasks._sentences("word " * 500_000)) == 1


def test_text_that_is_too_short_is_told(tmp_path):
    from ssm_trn.data.prepare import prepare

    generator = random.Random(0)
    lines = [json.dumps({"text": " ".join(generator.choices("abcdefghij", k=30)) + "."}) for _ in range(10)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    prepare(str(tmp_path / "data"), source=str(tmp_path / "short.jsonl"), vocab_size=275, holdout_every=4)
    for name in tasks.OWN_TASKS:
        with pytest.raises(ValueError, match="too short to make test items"):
            load_tasks([name], data=str(tmp_path / "data"))
