"""The command `ssm-trn`: help at once, one sentence for wrong input."""

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from ssm_trn import cli
from ssm_trn.cli import COMMANDS, main
from tests.training.tiny import prepare_data, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_config(folder / "config.yaml", prepare_data(folder))


def test_help_lists_each_command_and_imports_nothing_heavy():
    script = "import sys; from ssm_trn.cli import main; main(['--help']); print('torch' in sys.modules)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    lines = shown.stdout.splitlines()
    assert lines[-1] == "False"
    for name, (summary, _) in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, summary] for line in lines)


@pytest.mark.parametrize("command", ["prepare", "fit", "validate", "test", "evaluate", "compare", "generate"])
def test_each_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert "usage: ssm-trn" in capsys.readouterr().out


def error_of(words, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ssm-trn: error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("ssm-trn: error: ").strip()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model.init_args.config.layers", "[mamba9]"], "unknown mixer 'mamba9': choose one of attention"),
        (
            ["--model.init_args.config.layers", "[{mixer: attention, n_heads: 3}]"],
            "d_model 32 is not divisible by n_heads 3",
        ),
        (
            ["--model.init_args.config.layers", "[{mixer: attention, windw: 3}]"],
            "mixer 'attention' has no option 'windw'",
        ),
        (["--model.init_args.learning_rat", "1"], "'learning_rat' is not accepted; see ssm-trn fit --help"),
        (["--model.init_args.config.d_model", "wide"], "config.d_model: Expected a <class 'int'>. Got value: wide"),
        (["--trainer.gradient_clip_val", "x"], "trainer.gradient_clip_val: Expected a <class"),
        (["--model", "NoModel"], "model: Expected a path but NoModel either not accessible or invalid"),
        (["--trainer.accelerator", "abacus"], "accelerator='abacus'"),
        (["--model.init_args.learning_rate", "0"], "learning_rate is 0.0; it must be above 0"),
        (["--model.init_args.weight_decay", ".nan"], "weight_decay is nan"),
        (["--trainer.max_steps", "0"], "trainer.max_steps is 0; it must be above 0"),
        (["--trainer.log_every_n_steps", "0"], "trainer.log_every_n_steps is 0; it must be above 0"),
        (["--trainer.val_check_interval", "0"], "trainer.val_check_interval is 0; it must be above 0"),
        (["--trainer.accumulate_grad_batches", "0"], "trainer.accumulate_grad_batches is 0; it must be above 0"),
        (["--trainer.gradient_clip_val", "-1"], "trainer.gradient_clip_val is -1"),
        (["--trainer.devices", "x"], "trainer.devices is x: give the number of devices"),
        (["--model.init_args.config.vocab_size", "301"], "the data has a vocabulary of 300, the model one of 301"),
        (["--data.init_args.folder", "nowhere"], "no prepared data in nowhere"),
        (
            ["--data.init_args.block_length", "100000", "--trainer.num_sanity_val_steps", "0"],
            "fewer than one block of 100000",
        ),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--ckpt_path", "nowhere.ckpt"], "there is no checkpoint nowhere.ckpt"),
        (["--run_folder", ""], "the run has no folder: name one with --run_folder"),
    ],
)
def test_wrong_input_to_fit_is_told_in_one_sentence_and_leaves_nothing(config, tmp_path, capsys, words, sentence):
    run = tmp_path / "run"
    assert sentence in error_of(["fit", "--config", config, "--run_folder", str(run), *words], capsys)
    assert not run.exists()


def test_other_wrong_input_is_told_in_one_sentence(config, tmp_path, capsys):
    assert "unknown command 'trian': choose one of prepare, fit" in error_of(["trian"], capsys)
    assert "required: fit.data, fit.model; see ssm-trn fit --help" in error_of(["fit"], capsys)
    words = ["validate", "--config", config, "--run_folder", str(tmp_path / "none")]
    assert "has no checkpoint yet: train it first with ssm-trn fit" in error_of(words, capsys)
    words = ["prepare", str(tmp_path / "out"), "--source", str(tmp_path / "none")]
    assert f"the source '{tmp_path / 'none'}' is no file" in error_of(words, capsys)
    assert f"{tmp_path / 'none'} holds no model" in error_of(["evaluate", str(tmp_path / "none")], capsys)
    assert "none.yaml" in error_of(["compare", str(tmp_path / "none.yaml")], capsys)
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(monkeypatch):
    with pytest.raises(ValueError, match="unknown command"):
        main(["trian", "--debug"])
    monkeypatch.setenv("SSM_TRN_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown command"):
        main(["trian"])


def test_a_path_that_cannot_be_written_is_named_with_the_mend(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for words in (
        ["prepare", str(tmp_path / "file" / "data"), "--source", str(tmp_path / "text.txt"), "--vocab_size", "270"],
        ["fit", "--config", config, "--run_folder", str(tmp_path / "file" / "run")],
    ):
        (tmp_path / "text.txt").write_text("one line of text\n" * 40)
        error = error_of(words, capsys)
        assert str(tmp_path / "file") in error and "a file stands where a folder should be" in error


def test_names_that_are_empty_are_refused(capsys):
    assert "need a name" in error_of(["prepare", ""], capsys)
    assert "need a name" in error_of(["prepare", "data", "--source", ""], capsys)


@pytest.mark.parametrize(
    ("command", "hint"), [("fit", "--ckpt_path last"), ("compare", "goes on"), ("prepare", "stop")]
)
def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys, command, hint):
    def stopped(words):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, command, ("", stopped))
    assert main([command]) == 130
    error = capsys.readouterr().err
    assert error.startswith("ssm-trn: stopped") and hint in error and error.count("\n") == 1


def test_our_own_errors_are_not_hidden(monkeypatch):
    def broken(words):
        raise RuntimeError("a fault of ours")

    monkeypatch.setitem(COMMANDS, "broken", ("", broken))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(["broken"])


def test_a_function_becomes_a_command(monkeypatch):
    calls = []

    def function(folder: str, tasks: str = "a", overwrite: bool = False):
        calls.append((folder, tasks, overwrite))

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(function=function))
    command = cli._function("module", "function")
    for words in (["here", "--tasks", "x,y"], ["here", "--overwrite"], ["--overwrite", "here"]):
        command(words)
    assert calls == [("here", "x,y", False), ("here", "a", True), ("here", "a", True)]


def test_lm_eval_reads_the_other_words_and_the_hub_is_out_of_reach(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: calls.append((sys.argv, "HF_HUB_OFFLINE" in os.environ))
    )
    monkeypatch.setattr(sys, "argv", ["pytest"])
    for words in (["ls", "--online"], ["ls", "tasks"]):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert main(["lm-eval", *words]) == 0
    assert calls == [(["ssm-trn lm-eval", "ls"], False), (["ssm-trn lm-eval", "ls", "tasks"], True)]


def test_the_module_runs_as_a_program():
    shown = subprocess.run([sys.executable, "-m", "ssm_trn", "trian"], capture_output=True, text=True)
    assert shown.returncode == 2 and shown.stderr.startswith("ssm-trn: error: unknown command 'trian'")


def test_print_config_is_a_configuration(config, tmp_path, capsys):
    words = ["fit", "--config", config, "--run_folder", str(tmp_path / "run"), "--print_config"]
    assert main(words) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["max_steps"] == 8 and printed["run_folder"] == str(tmp_path / "run")
