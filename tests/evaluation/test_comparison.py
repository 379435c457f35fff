"""`ssm-trn compare` from a study to a report, in a tiny size."""

import json
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


@pytest.fixture
def study(tmp_path, data):
    """A study file, changed by keyword arguments, over the prepared data of these tests."""

    def write(**changes) -> str:
        corpus = str(Path(data).parent / "corpus.jsonl")
        prepared = {"source": corpus, "output": data, "vocab_size": 480, "holdout_every": 5}
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({**STUDY, "prepare": prepared, "output": str(tmp_path / "runs"), **changes}))
        return str(path)

    return write


def test_a_study_becomes_a_report(study, tmp_path, capsys):
    assert main(["compare", study(seeds=[0, 1])]) == 0
    results = json.loads((tmp_path / "runs" / "results.json").read_text())
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
    text = (tmp_path / "runs" / "report.md").read_text()
    assert report.table(results) in text and report.table(results) in capsys.readouterr().out
    for plot in ("learning_curves.svg", "decode_speed.svg"):
        assert "<svg" in (tmp_path / "runs" / plot).read_text() and plot in text


def test_a_stopped_comparison_goes_on_and_repeats_its_figures(study, tmp_path, monkeypatch):
    path, whole = study(), tmp_path / "whole"
    assert main(["compare", path, "--output", str(whole)]) == 0

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    # The first stop comes after the training of the first model, the second after all trainings.
    fit = command_line.run
    monkeypatch.setattr(command_line, "run", lambda *words: stop() if "transformer" in str(words) else fit(*words))
    with pytest.raises(KeyboardInterrupt):
        main(["compare", path])
    trained = tmp_path / "runs" / "mixture-seed0" / "model.safetensors"
    written = trained.stat().st_mtime_ns
    monkeypatch.setattr(command_line, "run", fit)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(comparison, "evaluate", stop)
        main(["compare", path])
    assert main(["compare", path]) == 0
    assert trained.stat().st_mtime_ns == written
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (whole, tmp_path / "runs"))
    for one, other in zip(first["models"], second["models"], strict=True):
        for same in ("bits_per_byte", "tasks", "learning_curve", "parameters"):
            assert one[same] == other[same]


def test_the_report_is_made_anew_from_the_results(study, tmp_path):
    path = study()
    assert main(["compare", path]) == 0
    text = (tmp_path / "runs" / "report.md").read_text()
    (tmp_path / "runs" / "report.md").unlink()
    assert main(["compare", path, "--only_report"]) == 0
    assert (tmp_path / "runs" / "report.md").read_text() == text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.main([str(tmp_path / "runs" / "results.json"), "--into", str(page)])
    results = report.read_results(tmp_path / "runs" / "results.json")
    assert page.read_text() == f"before\n{report.BEGIN}\n\n{report.table(results)}\n\n{report.END}\nafter\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "llama"}, "the baseline 'llama' is none of the models"),
        ({"models": {"transformer": {"d_model": 32, "layers": ["atention"]}}}, "unknown mixer 'atention'"),
        ({"parameters": 100}, "model 'mixture': no width brings this model to 100 parameters"),
        ({"tasks": ["nothing"]}, "nothing"),
        ({"seeds": []}, "at least one seed"),
        ({"colour": "blue"}, "colour"),
        ({"prepare": {"source": "missing.txt", "output": "data"}}, "missing.txt"),
    ],
)
def test_a_wrong_study_is_told_in_one_sentence(study, tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", study(**changes)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("ssm-trn: error: ") and message in error and "\n" not in error
    assert not (tmp_path / "runs" / "results.json").exists()


def test_a_changed_study_does_not_mix_with_what_is_there(study, tmp_path, capsys):
    assert main(["compare", study()]) == 0
    changed = {**STUDY["fit"], "model": {"init_args": {"learning_rate": 0.02, "warmup_steps": 2}}}
    assert main(["compare", study(fit=changed)]) == 2
    assert "holds a run of another study" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "no.yaml")]) == 2
    assert "there is no study" in capsys.readouterr().err


def test_the_table_has_a_place_in_a_page():
    with pytest.raises(ValueError, match="no place for the table"):
        report.into_markers("a page", "a table")
