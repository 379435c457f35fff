"""Training through the command line: interruptions, what a run folder holds, what a checkpoint may be used for."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from ssm_trn import LanguageModel
from ssm_trn.cli import main
from ssm_trn.data import Tokenizer
from ssm_trn.training import LanguageModelModule
from ssm_trn.training.checkpoints import last_checkpoint
from ssm_trn.training.command_line import run as run_command
from tests.training.runs import fit
from tests.training.tiny import metrics

ROOT = Path(__file__).parents[2]


def test_every_step_is_logged(undisturbed):
    rows = metrics(undisturbed)
    assert [row["step"] for row in rows if "train/loss" in row] == [str(step) for step in range(1, 9)]
    assert [row["step"] for row in rows if "validation/bits_per_byte" in row] == ["4", "8"]
    rates = [float(row["learning_rate"]) for row in rows if "learning_rate" in row]
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01]) and rates[3] < 0.01
    assert all(0 < float(row["gradient_norm"]) < 100 for row in rows if "gradient_norm" in row)
    assert float(rows[-1]["validation/loss"]) < float(rows[0]["train/loss"])
    assert list((undisturbed / "tensorboard").glob("events.*"))


def test_the_speed_is_logged_after_the_warm_up_steps(undisturbed):
    header, *rows = (undisturbed / "metrics.csv").read_text().splitlines()
    speeds = [row.split(",")[header.split(",").index("tokens_per_second")] for row in rows]
    steps = [row.split(",")[0] for row, speed in zip(rows, speeds, strict=True) if speed]
    assert steps == ["6", "7", "8"] and all(float(speed) > 0 for speed in speeds if speed)


def test_the_exported_model_is_the_trained_one(undisturbed):
    model = LanguageModel.from_pretrained(undisturbed)
    saved = torch.load(last_checkpoint(undisturbed), weights_only=True)
    assert saved["global_step"] == 8 and saved["ssm_trn_format_version"] == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["state_dict"][f"model.{name}"]), name
        assert torch.isfinite(value).all(), name
    assert Tokenizer.load(undisturbed / "tokenizer.model").vocab_size == model.config.vocab_size
    assert {path.name for path in undisturbed.iterdir()} == {
        "checkpoints",
        "config.json",
        "config.yaml",
        "generation_config.json",
        "meta.json",
        "metrics.csv",
        "model.safetensors",
        "tensorboard",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    }


def test_a_killed_run_goes_on_as_if_nothing_had_happened(config, undisturbed, tmp_path):
    """Killed in step 6 with a checkpoint of step 3: all rows and all weights are bitwise those of the whole run."""
    killer = tmp_path / "killer.yaml"
    callback = {"class_path": "tests.training.kill.KillAfter", "init_args": {"step": 5}}
    killer.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    run = tmp_path / "run"
    words = ["fit", "--config", config, "--run_folder", str(run), "--ckpt_path", "last"]
    killed = subprocess.run(
        [sys.executable, "-m", "ssm_trn", *words, "--config", str(killer)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert torch.load(last_checkpoint(run), weights_only=True)["global_step"] == 3
    assert metrics(run)[-1]["step"] == "5" and not (run / "model.safetensors").exists()
    assert main(words) == 0
    assert metrics(run) == metrics(undisturbed)
    assert (run / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_ctrl_c_stops_a_run_that_can_go_on(config, undisturbed, tmp_path, monkeypatch, capsys):
    def interrupt(module, batch, dataloader_idx):
        if module.trainer.global_step == 5:
            raise KeyboardInterrupt
        return batch

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "on_before_batch_transfer", interrupt)
        assert fit(config, tmp_path / "run") == 130
    assert "ssm-trn: stopped: the same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == handler
    assert fit(config, tmp_path / "run", "--ckpt_path", "last") == 0
    assert metrics(tmp_path / "run") == metrics(undisturbed)


@pytest.mark.parametrize("damage", ["cut", "foreign", "not_ours", "no_weights"])
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_damaged_checkpoint_is_told_in_one_sentence(config, undisturbed, tmp_path, capsys, command, damage):
    path = tmp_path / "damaged.ckpt"
    shutil.copy(last_checkpoint(undisturbed), path)
    if damage == "cut":
        os.truncate(path, 2000)
    elif damage == "foreign":
        path.write_text("hello")
    elif damage == "not_ours":
        torch.save([1], path)
    else:
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["state_dict"].popitem()
        torch.save(checkpoint, path)
    assert main([command, "--config", config, "--run_folder", str(tmp_path / "run"), "--ckpt_path", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ssm-trn: error: ") and error.count("\n") == 1 and "name another with --ckpt_path" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("step", "accumulate"), [(3, 1), (4, 1), (6, 1), (3, 2)])
def test_an_ended_run_goes_on_exactly(config, tmp_path, step, accumulate):
    """Ended at a checkpoint, at a validation without one, and where neither is due."""
    words = ["--model.init_args.final_learning_rate_ratio", "1.0"]  # the schedule knows the number of steps
    words += ["--trainer.accumulate_grad_batches", str(accumulate)]
    assert fit(config, tmp_path / "whole", *words) == 0
    assert fit(config, tmp_path / "parts", *words, "--trainer.max_steps", str(step)) == 0
    assert fit(config, tmp_path / "parts", *words, "--ckpt_path", "last") == 0
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert weights[0] == weights[1]


def test_what_the_command_line_says_wins_over_the_checkpoint(config, undisturbed, tmp_path):
    words = ["--config", config, "--run_folder", str(tmp_path / "run"), "--ckpt_path", last_checkpoint(undisturbed)]
    words += ["--model.init_args.learning_rate", "0.5", "--model.init_args.weight_decay", "0.25"]
    words += ["--model.init_args.betas", "[0.5, 0.6]", "--trainer.max_steps", "10"]
    ended = run_command("fit", words)
    groups = ended.trainer.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert all(group["betas"] == (0.5, 0.6) and group["lr"] > 0.05 for group in groups)
    assert [row["step"] for row in metrics(tmp_path / "run") if "train/loss" in row] == ["9", "10"]


def test_the_config_of_a_run_serves_validate_and_test(undisturbed, capsys):
    config = str(undisturbed / "config.yaml")
    before = {path: path.read_bytes() for path in undisturbed.iterdir() if path.is_file()}
    assert main(["validate", "--config", config, "--ckpt_path", "last"]) == 0
    printed = capsys.readouterr().out
    assert metrics(undisturbed)[-1]["validation/bits_per_byte"][:8] in printed
    assert main(["test", "--config", config]) == 0  # the last checkpoint needs no word
    assert "test/bits_per_byte" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in undisturbed.iterdir() if path.is_file()} == before


def test_a_folder_with_a_run_is_not_overwritten(config, undisturbed, capsys):
    before = (undisturbed / "metrics.csv").read_bytes()
    assert fit(config, undisturbed) == 2
    assert "holds a run already: continue it with --ckpt_path last" in capsys.readouterr().err
    assert (undisturbed / "metrics.csv").read_bytes() == before


def test_a_checkpoint_of_another_model_or_format_is_refused(config, undisturbed, tmp_path, capsys):
    last = last_checkpoint(undisturbed)
    words = ["--ckpt_path", last, "--model.init_args.config.d_model", "64"]
    assert fit(config, tmp_path / "run", *words) == 2
    assert "the checkpoint is of another model: its d_model is 32, the config's 64" in capsys.readouterr().err

    newer = torch.load(last, weights_only=True) | {"ssm_trn_format_version": 2}
    torch.save(newer, tmp_path / "newer.ckpt")
    assert fit(config, tmp_path / "run", "--ckpt_path", str(tmp_path / "newer.ckpt")) == 2
    assert "the checkpoint has format version 2, this ssm_trn reads 1" in capsys.readouterr().err

    assert fit(config, tmp_path / "run", "--ckpt_path", last, "--model.init_args.decay_embeddings", "true") == 2
    assert "keep decay_embeddings as it was" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    from ssm_trn.training.checkpoints import WholeFileCheckpoints

    path = tmp_path / "last.ckpt"
    WholeFileCheckpoints().save_checkpoint({"step": 1}, path)

    def cut_short(checkpoint, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", cut_short)
    with pytest.raises(OSError, match="no space left"):
        WholeFileCheckpoints().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
