import json
import random
import shutil
from functools import partial
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks._yaml_loader import load_yaml

from ssm_trn.cli import main
from ssm_trn.data import held_out_documents
from ssm_trn.evaluation import held_out_tasks
from ssm_trn.evaluation.tasks import load_tasks, near_tasks
from tests.evaluation.samples import ARC

OFFICIAL = Path(lm_eval.tasks.__file__).parent
OWN_TASKS = ("true_ending", "word_order")
BENCHMARKS = Path(__file__).parents[2].parent / "shared" / "data" / "benchmarks"


# The tasks that need files, and how many single tasks each of them is.
OFFICIAL_TASKS = {"blimp": 67, "xcopa": 11, "crows_pairs": 10} | dict.fromkeys(
    ["arc_challenge", "arc_easy", "boolq", "copa", "gsm8k", "lambada_openai", "piqa", "wikitext", "winogrande"], 1
)
# What a definition says of its data, and what is shown of it; all else must be lm-eval's.
SOURCE = {"training_split", "validation_split", "test_split", "tag", "metadata"}


def test_official_tasks_differ_from_lm_eval_in_their_data_alone(benchmarks, caplog):
    loaded = load_tasks(list(OFFICIAL_TASKS), benchmarks=benchmarks)
    assert len(loaded["tasks"]) == sum(OFFICIAL_TASKS.values())
    folders = ["arc", "blimp", "crows_pairs", "gsm8k", "lambada", "piqa", "super_glue/boolq", "super_glue/copa"]
    folders += ["wikitext", "winogrande", "xcopa"]
    definitions = [load_yaml(path) for folder in folders for path in OFFICIAL.glob(f"{folder}/**/*.yaml")]
    theirs = {definition.get("task"): definition for definition in definitions if "group" not in definition}
    for name, task in loaded["tasks"].items():
        ours = task.config.to_dict(keep_callable=True)
        for key in theirs[name].keys() - SOURCE:
            assert comparable(ours.get(key)) == comparable(theirs[name][key]), (name, key)
        assert ours["metadata"]["version"] == theirs[name].get("metadata", {}).get("version")
        assert len(task.eval_docs) == {"crows_pairs_english": 9}.get(name, 1 if "crows" in name else 3)
    assert dict(loaded["tasks"]["arc_easy"].eval_docs[0]) == ARC
    assert len(list(loaded["tasks"]["gsm8k"].fewshot_docs())) == 6
    assert {group.name: len(group.child_names) for group in loaded["groups"].values()} == {"blimp": 67, "xcopa": 11}
    near = {name for name, task in loaded["tasks"].items() if (task.config.task_alias or "").endswith("(near)")}
    assert (
        near == set(near_tasks(loaded)) == {"gsm8k", "wikitext"} | {name for name in loaded["tasks"] if "crows" in name}
    )
    assert "near lm-eval's task, not equal to it: gsm8k (its few-shot examples" in caplog.text
    assert "of crows_pairs these need the hub and are left out: crows_pairs_english_autre, crows_pairs_f" in caplog.text


def comparable(value):
    """Two partial functions of the same function and arguments are not equal, though they do the same."""
    return (value.func, value.keywords) if isinstance(value, partial) else value


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the folder of whole benchmark files is not here")
def test_whole_benchmark_files_have_the_published_number_of_items():
    items = {"lambada_openai": 5153, "piqa": 1838, "winogrande": 1267, "arc_easy": 2376, "arc_challenge": 1172}
    items |= {"boolq": 3270, "copa": 100, "wikitext": 62, "blimp_wh_island": 1000, "xcopa_et": 500, "gsm8k": 1319}
    items |= {"crows_pairs_english": 1508}  # of the first release
    loaded = load_tasks(list(items), benchmarks=BENCHMARKS)
    assert {name: len(task.eval_docs) for name, task in loaded["tasks"].items()} == items


def test_benchmarks_folder_may_come_from_the_environment(benchmarks, monkeypatch):
    monkeypatch.setenv("SSM_TRN_BENCHMARKS", benchmarks)
    assert list(load_tasks(["piqa"])["tasks"]) == ["piqa"]


def test_training_items_are_taken_where_there_are_any(benchmarks, tmp_path):
    folder = shutil.copytree(benchmarks, tmp_path / "benchmarks")
    [without] = load_tasks(["piqa"], benchmarks=folder)["tasks"].values()
    shutil.copy(folder / "piqa" / "validation.jsonl", folder / "piqa" / "train.jsonl")
    [with_them] = load_tasks(["piqa"], benchmarks=folder)["tasks"].values()
    assert (without.has_training_docs(), with_them.has_training_docs()) == (False, True)
    (folder / "gsm8k" / "train.jsonl").unlink()  # five of them stand in each question
    with pytest.raises(FileNotFoundError, match="gsm8k/train.jsonl: put them there"):
        load_tasks(["gsm8k"], benchmarks=folder)


def test_a_folder_is_listed_with_what_it_lacks(benchmarks, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SSM_TRN_BENCHMARKS", raising=False)
    assert main(["benchmarks", "--folder", benchmarks]) == 0
    listed = capsys.readouterr().out
    assert "missing" not in listed
    assert "true_ending, word_order" in listed.splitlines()[0]
    for line in ("nyu-mll/blimp: 67 of 67 files; for blimp\n", "openai/gsm8k: 2 of 2 files; for gsm8k, gsm8k_cot"):
        assert line in listed
    folder = shutil.copytree(benchmarks, tmp_path / "benchmarks")
    (folder / "piqa" / "validation.jsonl").unlink()
    assert main(["benchmarks", "--folder", str(folder)]) == 0
    assert "baber/piqa: 0 of 1 files; for piqa\n    missing: piqa/validation.jsonl\n" in capsys.readouterr().out
    assert main(["benchmarks"]) == 0
    assert "set SSM_TRN_BENCHMARKS" in capsys.readouterr().out
    assert main(["benchmarks", "--folder", "none/such"]) == 2
    assert "there is no folder none/such: name one of benchmark files" in capsys.readouterr().err


def test_wrong_names_and_folders_are_told_in_a_sentence(benchmarks, tmp_path, monkeypatch):
    monkeypatch.delenv("SSM_TRN_BENCHMARKS", raising=False)
    unknown = r"unknown task 'arc_eazy' \(did you mean arc_easy\?\), or .* the Hugging Face hub: .*--online"
    with pytest.raises(ValueError, match=unknown):
        load_tasks(["arc_eazy"], benchmarks=benchmarks)
    for name in ("piqa", "blimp"):
        with pytest.raises(ValueError, match="needs its data file.*--benchmarks or SSM_TRN_BENCHMARKS.*--online"):
            load_tasks([name])
    with pytest.raises(ValueError, match="aps/super_glue of the Hugging Face hub"):
        load_tasks(["sglue_rte"], benchmarks=benchmarks)
    with pytest.raises(FileNotFoundError, match="lacks files of .*, blimp/adjunct_island.jsonl and 66 more: put them"):
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
        with pytest.raises(ValueError, match=f"lacks what task '{task}' needs .*: get it anew"):
            load_tasks([task], benchmarks=str(tmp_path))
    with pytest.raises(ValueError, match="made from held-out text.*--data"):
        load_tasks(["true_ending"])


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that cannot be reached, and the data sets that it was asked for."""
    asked = []

    def unreachable(path, *args, **kwargs):
        asked.append(path)
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (offline)")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    monkeypatch.delenv("SSM_TRN_BENCHMARKS", raising=False)
    return asked


def test_the_hub_is_asked_only_where_that_is_allowed(no_hub, benchmarks):
    with pytest.raises(
        ValueError, match="'wikitext' reads its data from the network .*wikitext_document_level.*network"
    ):
        load_tasks(["wikitext"], online=True)
    assert no_hub == ["EleutherAI/wikitext_document_level"]
    assert list(load_tasks(["wikitext"], online=True, benchmarks=benchmarks)["tasks"]) == ["wikitext"]
    with pytest.raises(ValueError, match="super_glue of the Hugging Face hub: allow"):
        load_tasks(["sglue_rte"])
    assert len(no_hub) == 1


def items_of(name: str, data: str) -> list[dict]:
    return list(load_tasks([name], data=data)["tasks"][name].eval_docs)


@pytest.mark.parametrize("name", OWN_TASKS)
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
    spans = held_out_tasks._sentences(document)
    assert [document[a:b] for a, b in spans] == [
        "A title",
        'One is "free."',
        "Two (2)!",
        "Is it?",
        "Yes: 3.5 of it",
        "end",
    ]
    assert len(held_out_tasks._sentences("word " * 500_000)) == 1


def test_text_that_is_too_short_is_told(tmp_path):
    from ssm_trn.data.prepare import prepare

    generator = random.Random(0)
    lines = [json.dumps({"text": " ".join(generator.choices("abcdefghij", k=30)) + "."}) for _ in range(10)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    prepare(str(tmp_path / "data"), source=str(tmp_path / "short.jsonl"), vocab_size=275, holdout_every=4)
    for name in OWN_TASKS:
        with pytest.raises(ValueError, match="too short to make test items"):
            load_tasks([name], data=str(tmp_path / "data"))
