"""`ssm-trn lm-eval`: lm-eval's own command line with our model and tasks."""

import json
from pathlib import Path

import pytest
import yaml

from ssm_trn.cli import main
from tests.evaluation.models import tiny_model

DOCUMENTS = [
    {"text": f"The {word} of the nation, which is free, is 1945. The {word} of the nation", "value": "which is free"}
    for word in ("peace", "work")
]


@pytest.fixture(scope="module")
def run_folder(data, tokenizer, tmp_path_factory) -> Path:
    """A run folder as training leaves it."""
    folder = tmp_path_factory.mktemp("run")
    tiny_model("hybrid", tokenizer.vocab_size).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.model")
    settings = {"class_path": "ssm_trn.data.TokenDataModule", "init_args": {"folder": data, "block_length": 512}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    return folder


def lm_eval(run_folder: Path, tasks: str, *words: str) -> int:
    arguments = ["--model", "ssm_trn", "--model_args", f"pretrained={run_folder}", "--batch_size", "auto"]
    return main(["lm-eval", *arguments, "--tasks", tasks, "--limit", "2", *words])


def test_tasks_of_files_of_the_package_and_of_the_user_in_one_run(run_folder, benchmarks, tmp_path, capsys):
    (tmp_path / "items.jsonl").write_text(json.dumps({"question": "free", "answer": " nation"}) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'items.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: question\ndoc_to_target: answer\n"
        "metric_list: [{metric: acc}]\n"
    )
    places = [
        "--benchmarks",
        benchmarks,
        "--include_path",
        str(tmp_path / "tasks"),
        "--output_path",
        str(tmp_path / "out"),
    ]
    assert lm_eval(run_folder, "true_ending,gsm8k,xcopa_et,mine", *places) == 0
    printed = capsys.readouterr().out
    assert "|gsm8k (near)|" in printed and "|mine " in printed
    [results] = (tmp_path / "out").rglob("results_*.json")
    content = json.loads(results.read_text())
    assert set(content["results"]) == {"true_ending", "gsm8k", "xcopa_et", "mine"}
    assert content["config"]["max_length"] == 512 and len(content["config"]["model_sha"]) == 64


@pytest.fixture
def hub(monkeypatch):
    """A hub that has the data sets of SWDE, FDA and SQuAD completion, and what it was asked for."""
    import datasets

    asked = []

    def load(path, name=None, **kwargs):
        asked.append(path)
        return datasets.DatasetDict({"validation": datasets.Dataset.from_list(DOCUMENTS)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_recall_in_cloze_form_comes_from_the_hub(run_folder, hub, tmp_path, capsys):
    assert lm_eval(run_folder, "swde,fda,squad_completion", "--online", "--output_path", str(tmp_path)) == 0
    assert sorted(hub) == ["hazyresearch/based-fda", "hazyresearch/based-squad", "hazyresearch/based-swde-v2"]
    [results] = tmp_path.rglob("results_*.json")
    assert {*json.loads(results.read_text())["results"]} == {"swde", "fda", "squad_completion"}
    assert lm_eval(run_folder, "swde") == 2
    assert "task 'swde' needs data of the Hugging Face hub: allow that with --online" in capsys.readouterr().err
    assert len(hub) == 3


def test_a_cache_is_one_models_own(run_folder, benchmarks, tokenizer, tmp_path, capsys):
    words = ["--benchmarks", benchmarks, "--use_cache", str(tmp_path / "cache")]
    assert lm_eval(run_folder, "copa", *words) == lm_eval(run_folder, "copa", *words) == 0
    other = tmp_path / "other"
    tiny_model("hybrid", tokenizer.vocab_size, seed=1).save_pretrained(other)
    tokenizer.save(other / "tokenizer.model")
    capsys.readouterr()
    assert (
        main(
            [
                "lm-eval",
                "--model",
                "ssm_trn",
                "--model_args",
                f"pretrained={other},max_length=512",
                "--tasks",
                "copa",
                *words,
            ]
        )
        == 2
    )
    assert "cache_rank0.db holds answers of another model" in capsys.readouterr().err


def test_wrong_input_is_told_in_a_sentence(run_folder, benchmarks, capsys):
    def told(tasks: str, model_args: str = "", *words: str) -> str:
        arguments = ["--model", "ssm_trn", "--model_args", model_args or f"pretrained={run_folder}"]
        assert main(["lm-eval", *arguments, "--tasks", tasks, *words]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ssm-trn: error: ")]
        return line

    assert "has no argument 'dtype': it takes pretrained" in told(
        "true_ending", f"pretrained={run_folder},dtype=float16"
    )
    assert "name it with --model_args pretrained=RUN_DIR" in told("true_ending", "max_length=9")
    assert "batch_size is 'many'" in told("true_ending", f"pretrained={run_folder},batch_size=many")
    assert "task 'piqa' needs its data file: name a folder of benchmark files with --benchmarks" in told("piqa")
    assert "there is no folder none/such" in told("piqa", "", "--benchmarks", "none/such")
    assert "holds no model" in told("true_ending", "pretrained=none/such")
