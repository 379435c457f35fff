"""`ssm-trn compare` from a study to a report, in a tiny size."""

import fcntl
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from ssm_trn.cli import main
from ssm_trn.evaluation import comparison, report
from ssm_trn.evaluation.jobs import best_learning_rate
from ssm_trn.evaluation.study import Study
from ssm_trn.results import BEGIN, END, into_markers, read_results
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


def fit_with(part: str, **changes) -> dict:
    """STUDY's fit with other values in its trainer, or in the init_args of its model or data."""
    fit = json.loads(json.dumps(STUDY["fit"]))
    (fit[part] if part == "trainer" else fit[part]["init_args"]).update(changes)
    return {"fit": fit}


@pytest.fixture(scope="module", autouse=True)
def few_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_TIMING_ROUNDS", 1)
        patch.setattr(comparison, "_NEW_TOKENS", 4)
        yield


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
    assert transformer["state_bytes"]["40"] >= 4 * 2 * 40 * 32  # keys and values of one layer in float32
    assert "difference" in mixture and "difference" not in transformer
    difference = mixture["bits_per_byte"]["value"] - transformer["bits_per_byte"]["value"]
    assert mixture["difference"]["value"] == pytest.approx(difference)
    text = (folder / "report.md").read_text()
    assert report.table(results) in text
    for plot in ("learning_curves.svg", "decode_speed.svg", "state.svg", "first_token.svg", "loss_by_position.svg"):
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
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    report.main([str(folder / "results.json"), "--into", str(page)])
    table = report.table(read_results(folder / "results.json", "models"))
    assert page.read_text() == f"before\n{BEGIN}\n\n{table}\n\n{END}\nafter\n"


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
        ({"seeds": [-1]}, "all of them different, from 0 on"),
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
    values = asdict(Study.read("experiments/compare_quick.yaml"))
    sizes = {variant.config.parameter_count() for variant in Study(**values).variants(4096)}
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
        into_markers("a page", "a table")


@pytest.fixture(scope="module")
def searched(tmp_path_factory, study) -> tuple[str, Path]:
    """A study of two sizes with two learning rates to try, its first job done alone in a process of its own."""
    folder = tmp_path_factory.mktemp("search") / "runs"
    fit = json.loads(json.dumps(STUDY["fit"]))
    del fit["trainer"]["max_steps"], fit["model"]["init_args"]["learning_rate"]
    models = {"linear": "linear_attention", "transformer": STUDY["models"]["transformer"]}
    path = study(
        folder, models=models, shape={"d_model": 32, "n_layers": 1}, parameters=[40_000, 60_000], fit=fit, tasks=[],
        tokens=3 * 4 * 32, learning_rates=[1e-6, 0.01], seeds=[0, 1], position_length=16,
    )  # fmt: skip
    assert main(["compare", path, "--job", "0", "--launcher", sys.executable]) == 0
    assert [run.name for run in folder.iterdir()] == ["linear-40k-lr1e-06-seed0"]
    assert main(["compare", path]) == 0
    return path, folder


def test_each_model_has_the_learning_rate_that_served_it_best(searched):
    _, folder = searched
    results = read_results(folder / "results.json", "models")
    assert [(of["name"], of["seed"]) for of in results["models"]] == [
        (f"{model}-{size}k", seed) for seed in (0, 1) for size in (40, 60) for model in ("linear", "transformer")
    ]
    for name in {of["name"] for of in results["models"]}:
        tries = {of["learning_rate"]: of for of in results["learning_rates"] if of["name"] == name}
        assert tries[0.01]["validation_loss"] < tries[1e-6]["validation_loss"] and tries[0.01]["chosen"]
        assert not tries[1e-6]["chosen"]
        assert all(of["settings"]["learning_rate"] == 0.01 for of in results["models"] if of["name"] == name)
    assert results["models"][0]["loss_by_position"]["positions"] == [1, 2, 4, 8, 16]
    trained = {run.name for run in folder.iterdir() if run.is_dir()}
    assert "linear-40k-lr0.01-seed0" in trained and "linear-40k-seed1" in trained
    assert "linear-40k-seed0" not in trained  # the try was that training already


def test_a_learning_rate_that_is_too_high_loses(study, tmp_path):
    small = {"models": {"transformer": STUDY["models"]["transformer"]}, "parameters": None, "tasks": []}
    path = study(tmp_path, **small, learning_rates=[0.01, 1e20])
    for job in ("1", "0"):
        assert main(["compare", path, "--job", job]) == 0
    plan = Study.read(path)
    variants = plan.variants(480)
    assert best_learning_rate(plan.jobs(variants), variants[0], tmp_path) == 0.01


def test_two_processes_do_not_share_a_run(study, tmp_path, capsys):
    run = tmp_path / "mixture-seed0"
    run.mkdir()
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert main(["compare", study(tmp_path), "--job", "0"]) == 2
    os.close(descriptor)
    assert f"another process works in {run}" in capsys.readouterr().err


def test_runs_may_be_moved_and_what_is_damaged_is_told(study, finished, tmp_path, capsys):
    path, folder = finished
    moved = shutil.copytree(folder, tmp_path / "moved")
    words = ["compare", path, "--output", str(moved)]
    assert main([*words, "--job", "0"]) == 0 and "training" not in capsys.readouterr().out
    run = moved / "mixture-seed0"
    (run / "evaluation.json").write_text("[]")
    assert main([*words, "--job", "0"]) == 2 and "evaluation.json is damaged: remove it" in capsys.readouterr().err
    (run / "model.safetensors").unlink()
    (run / "experiment.yaml").write_text("a: [")
    assert main([*words, "--job", "0"]) == 2 and "experiment.yaml is not YAML" in capsys.readouterr().err
    results = json.loads((moved / "results.json").read_text())
    for wrong in ({**results, "models": [{}]}, {name: results[name] for name in results if name != "study"}):
        (moved / "results.json").write_text(json.dumps(wrong))
        assert main([*words, "--only_report"]) == 2
        assert "lacks something that this release reports" in capsys.readouterr().err
    (moved / "results.json").unlink()
    assert main([*words, "--only_report"]) == 2 and "run ssm-trn compare without" in capsys.readouterr().err


def test_what_is_null_is_as_if_left_out(study, tmp_path):
    plan = Study.read(study(tmp_path, tasks=None, contexts=None, seeds=None, shape=None))
    assert (plan.tasks, plan.contexts, plan.seeds, plan.shape) == ([], [256, 2048], [0], {})


def test_jobs_are_listed_with_what_is_done(searched, capsys):
    assert main(["compare", searched[0], "--list_jobs"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    jobs = [line for line in lines if "done" in line]
    assert (
        len(jobs) == 2 * 2 * 2 + 2 * 2
        and "linear-40k-lr1e-06-seed0: seed 0, learning rate 1e-06, 384 tokens" in jobs[0]
    )
    assert "the best learning rate" in jobs[-1]


def test_wrong_jobs_are_told(searched, study, tmp_path, capsys):
    path, _ = searched
    assert main(["compare", path, "--job", "12"]) == 2
    assert "there is no job 12: the study has those from 0 to 11" in capsys.readouterr().err
    assert main(["compare", path, "--output", str(tmp_path), "--job", "8"]) == 2
    assert "the learning rate of linear-40k is not known yet: run job 0, 1 first" in capsys.readouterr().err
    assert main(["compare", path, "--output", str(tmp_path), "--job", "0", "--launcher", "false"]) == 2
    assert "the training ended with status 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 100}, "sets one of tokens, tokens_per_parameter and trainer.max_steps"),
        ({"learning_rates": [0.1, 0.1]}, "learning_rates of a study must be different"),
        ({"learning_rates": []}, "learning_rates of a study must be different"),
        ({"models": {"transformer": "attention"}}, "names the mixer attention: give its shape"),
        ({"seeds": [1, 1]}, "all of them different"),
        ({"parameters": []}, "must be at least 1"),
        ({"seeds": [2**32]}, "below 2\\*\\*32"),
        ({"contexts": [8, 8]}, "all of them different"),
        ({"learning_rates": [0.1, float("nan")]}, "learning_rates of a study must be different numbers above 0"),
        ({"learning_rates": [0.001, 0.0010000001]}, "learning_rates of a study must be different"),
        ({"models": {1: {}, "transformer": {}}}, "the model 1 cannot name a folder"),
        ({"models": {"a|b": {}, "transformer": {}}}, "the model 'a|b' cannot name a folder"),
        (
            {"models": {"transformer": {}}, "prepare": {"output": 3}},
            "prepare: output is 3, which should be of type str",
        ),
        (fit_with("data", batch_size="8"), "data.init_args.batch_size of the study's fit is '8'"),
        (fit_with("data", block_length=1.5), "data.init_args.block_length of the study's fit is 1.5"),
        (fit_with("trainer", max_steps=-1), "trainer.max_steps of the study's fit is -1"),
        (fit_with("trainer", accumulate_grad_batches=[1]), "accumulate_grad_batches of the study's fit is"),
        (fit_with("trainer", max_epochs=1), "the study's trainer sets max_epochs"),
        (fit_with("model", learning_rate=None), "learning_rate of the study's fit is None"),
        (fit_with("model", learning_rate="fast"), "learning_rate of the study's fit is 'fast'"),
        (fit_with("model", config={"d_model": 8}), "each of the study's models has its own"),
        ({"fit": {**STUDY["fit"], "model": {"init_arg": {}}}}, "fit.model takes init_args, and no class_path but"),
        ({"fit": {**STUDY["fit"], "model": {"class_path": "mine.Module"}}}, "fit.model takes init_args"),
        ({"fit": {"data": STUDY["fit"]["data"]}, "tokens": 3}, "has 3 tokens, fewer than the 128 of a step"),
        ({"learning_rates": [0.1, 0.2], **fit_with("trainer", val_check_interval=7)}, "more than the 6 batches"),
        ({"learning_rates": [0.1, 0.2], **fit_with("trainer", val_check_interval=None)}, "set val_check_interval"),
        ({"learning_rates": [0.1, 0.2], **fit_with("trainer", limit_val_batches=0)}, "limit_val_batches not to 0"),
        ({"parameters": [40_000, 40_040]}, "are called mixture-40k"),
    ],
)
def test_a_study_checks_itself(study, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        plan = Study.read(study(tmp_path, **changes))
        plan.jobs(plan.variants(480))


def test_tokens_in_proportion_to_the_size(study, tmp_path):
    fit = json.loads(json.dumps(STUDY["fit"]))
    del fit["trainer"]["max_steps"]
    plan = Study.read(
        study(tmp_path, fit=fit, tokens_per_parameter=0.5, parameters=[40_000, 60_000], search_tokens=1280)
    )
    jobs = plan.jobs(plan.variants(480))
    assert [job.steps for job in jobs] == [int(0.5 * job.variant.config.parameter_count() + 0.5) // 128 for job in jobs]
    assert {job.run for job in jobs} == {f"{name}-{size}k-seed0" for name in plan.models for size in (40, 60)}
