"""`ssm-trn compare` from a study to a report, in a tiny size."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from ssm_trn.cli import main
from ssm_trn.evaluation import comparison, report
from ssm_trn.training import command_line

STUDY = {
    "title": "Two tiny models",
    "baseline": "transformer",
    "parameters": 40_000,
    "models": {
        "mixture": {"d_model": 32, "layers": ["gated_deltanet", {"mixer": "attention", "n_heads": 2}]},
        "transformer": {"d_model": 32, "layers": [{"mixer": "attention", "n_heads": 2}]},
    },
    "fit": {
        "model": {"init_args": {"learning_rate": 0.01, "warmup_steps": 2}},
        "data": {"init_args": {"block_length": 32, "batch_size": 4}},
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 6,
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "enable_progress_bar": False,
            "log_every_n_steps": 1,
        },
    },
    "tasks": ["true_ending"],
    "task_limit": 3,
    "contexts": [16, 40],
}


@pytest.fixture(scope="module")
def study(tmp_path_factory, data):
    """Writes a study over the prepared data of these tests, changed by keyword arguments; returns its file."""

    def write(output: Path, **changes) -> str:
        corpus = str(Path(data).parent / "corpus.jsonl")
        prepared = {"source": corpus, "output": data, "vocab_size": 480, "holdout_every": 5}
        path = tmp_path_factory.mktemp("study") / "study.yaml"
        path.write_text(yaml.safe_dump({**STUDY, "prepare": prepared, "output": str(output), **changes}))
        return str(path)

    return write


@pytest.fixture(scope="module")
def finished(tmp_path_factory, study) -> tuple[str, Path]:
    """A study with two seeds and the folder of its results."""
    folder = tmp_path_factory.mktemp("comparison") / "runs"
    path = study(folder, seeds=[0, 1])
    assert main(["compare", path]) == 0
    return path, folder


def test_a_study_becomes_a_report(finished):
    _, folder = finished
    results = json.loads((folder / "results.json").read_text())
    assert results["format_version"] == 1
    assert [(model["name"], model["seed"]) for model in results["models"]] == [
        ("mixture", 0),
        ("transformer", 0),
        ("mixture", 1),
        ("transformer", 1),
    ]
    for model in results["models"]:
        assert abs(model["parameters"] / 40_000 - 1) < 0.01 and model["tokens"] == 6 * 4 * 32
        assert model["bits_per_byte"]["low"] <= model["bits_per_byte"]["value"] <= model["bits_per_byte"]["high"]
        assert model["tasks"]["true_ending"]["items"] == 3
        assert model["learning_curve"]["tokens"] == [3 * 4 * 32, 6 * 4 * 32]
        assert model["training_tokens_per_second"] > 0 and set(model["decode_tokens_per_second"]) == {"16", "40"}
    mixture, transformer = results["models"][:2]
    assert transformer["state_bytes"]["40"] == 4 * 2 * 40 * 32  # keys and values of one layer in float32
    assert "difference" in mixture and "difference" not in transformer
    difference = mixture["bits_per_byte"]["value"] - transformer["bits_per_byte"]["value"]
    assert mixture["difference"]["value"] == pytest.approx(difference)
    text = (folder / "report.md").read_text()
    assert report.table(results) in text
    for plot in ("learning_curves.svg", "decode_speed.svg"):
        assert "<svg" in (folder / plot).read_text() and plot in text


def test_a_stopped_comparison_goes_on_and_repeats_its_figures(study, finished, tmp_path, monkeypatch):
    path = study(tmp_path)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    # The first stop comes after the training of the first model, the second after all trainings.
    fit = command_line.run
    monkeypatch.setattr(command_line, "run", lambda *words: stop() if "transformer" in str(words) else fit(*words))
    assert main(["compare", path]) == 130
    trained = tmp_path / "mixture-seed0" / "model.safetensors"
    written = trained.stat().st_mtime_ns
    monkeypatch.setattr(command_line, "run", fit)
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "evaluate", stop)
        assert main(["compare", path]) == 130
    assert main(["compare", path]) == 0
    assert trained.stat().st_mtime_ns == written
    undisturbed, resumed = (json.loads((folder / "results.json").read_text()) for folder in (finished[1], tmp_path))
    assert len(resumed["models"]) == 2
    for one, other in zip(undisturbed["models"][:2], resumed["models"], strict=True):
        for same in ("name", "bits_per_byte", "tasks", "learning_curve", "parameters"):
            assert one[same] == other[same]


def test_the_report_is_made_anew_from_the_results(finished, tmp_path):
    path, folder = finished
    text = (folder / "report.md").read_text()
    (folder / "report.md").unlink()
    assert main(["compare", path, "--only_report"]) == 0
    assert (folder / "report.md").read_text() == text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.main([str(folder / "results.json"), "--into", str(page)])
    table = report.table(report.read_results(folder / "results.json", "models"))
    assert page.read_text() == f"before\n{report.BEGIN}\n\n{table}\n\n{report.END}\nafter\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "llama"}, "the baseline 'llama' is none of the models"),
        ({"models": {"transformer": {"d_model": 32, "layers": ["atention"]}}}, "unknown mixer 'atention'"),
        ({"parameters": 100}, "model 'mixture': no width brings this model to 100 parameters"),
        ({"tasks": ["nothing"]}, "nothing"),
        ({"seeds": []}, "at least one seed"),
        ({"fit": {"trainer": {"max_steps": 3}}}, "does not set data.init_args.batch_size"),
        ({"fit": {**STUDY["fit"], "trainer": "none.yaml"}}, "there is no file"),
        ({"models": {"transformer": "none.yaml"}}, "there is no file"),
        ({"colour": "blue"}, "colour"),
        ({"contexts": [0, 8]}, "must be at least 1"),
        ({"task_limit": 0}, "must be at least 1"),
        ({"parameters": 0}, "must be at least 1"),
        ({"seeds": [-1]}, "seeds at least 0"),
        ({"prepare": {"output": "data", "vocabulary": 300}}, "prepare has 'vocabulary'"),
        ({"prepare": {"source": "sotu"}}, "prepare"),
        ({"fit": {**STUDY["fit"], "model": [1]}}, "'model' is [1], which should be a mapping"),
        ({"prepare": {"source": "missing.txt", "output": "data"}}, "missing.txt"),
        ({"fit": {**STUDY["fit"], "trainer": {"max_steps": 3, "devices": "none"}}}, "devices"),
    ],
)
def test_a_wrong_study_is_told_in_one_sentence(study, tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", study(tmp_path / "runs", **changes)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("ssm-trn: error: ") and message in error and "\n" not in error
    assert not (tmp_path / "runs").exists()


def test_a_changed_study_does_not_mix_with_what_is_there(study, finished, capsys):
    changed = {**STUDY["fit"], "model": {"init_args": {"learning_rate": 0.02, "warmup_steps": 2}}}
    assert main(["compare", study(finished[1], fit=changed)]) == 2
    assert "holds a run of another study" in capsys.readouterr().err
    assert main(["compare", "no.yaml"]) == 2
    assert "there is no study" in capsys.readouterr().err


def test_the_study_of_make_compare_runs_in_a_tiny_size(study, tmp_path):
    values = asdict(comparison.Study.read("experiments/compare_quick.yaml"))
    sizes = {
        comparison.model_config(comparison.Study(**values), name, 4096).parameter_count() for name in values["models"]
    }
    assert max(sizes) / min(sizes) < 1.01 and max(sizes) / values["parameters"] < 1.01
    values["fit"]["trainer"] |= {"max_steps": 2, "val_check_interval": 2, "enable_progress_bar": False}
    values["fit"]["data"]["init_args"] |= {"block_length": 16, "batch_size": 2}
    tiny = {name: values[name] for name in ("title", "models", "baseline", "fit", "tasks")}
    assert main(["compare", study(tmp_path, **tiny, parameters=None, task_limit=2, contexts=[16, 32])]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [model["name"] for model in results["models"]] == list(values["models"])
    assert list(results["models"][0]["tasks"]) == values["tasks"]


def test_a_results_file_without_results_is_told(tmp_path):
    for content, message in (("{", "not a results file"), ('{"format_version": 1}', "has no models")):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            report.main([str(tmp_path / "results.json")])


def test_the_table_has_a_place_in_a_page():
    with pytest.raises(ValueError, match="no place for the table"):
        report.into_markers("a page", "a table")
