"""Several processes, which torchrun starts: they do what one does, with the same files at the end."""

import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from ssm_trn import LanguageModel
from ssm_trn.cli import main
from ssm_trn.layers import float32_parameters
from ssm_trn.training.checkpoints import last_checkpoint
from tests.training.processes import assert_same_run, assert_same_weights, torchrun, write_packed_config
from tests.training.tiny import metrics


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = Path(write_packed_config(tmp_path_factory.mktemp("data")))
    changed = yaml.safe_load(path.read_text())
    changed["trainer"] |= {"accumulate_grad_batches": 2, "val_check_interval": 8}  # batches
    path.write_text(yaml.safe_dump(changed))
    return str(path)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The folder of a run of one process."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    assert main(["fit", "--config", config, "--run_folder", str(run)]) == 0
    return run


@pytest.fixture(scope="module")
def killed(config, tmp_path_factory):
    """A run of two processes under FSDP2, of which one is killed in step 6, and what torchrun said and when."""
    folder = tmp_path_factory.mktemp("runs")
    callback = {"class_path": "tests.training.kill.KillAfter", "init_args": {"step": 5, "rank": 1}}
    (folder / "killer.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [callback], "strategy": "fsdp2"}}))
    words = ["--config", config, "--config", str(folder / "killer.yaml"), "--run_folder", str(folder / "killed")]
    return folder / "killed", torchrun(2, "fit", *words), time.time()


def test_fsdp2_does_what_one_process_does(killed, alone):
    run, ended, _ = killed
    assert [row["step"] for row in metrics(run) if "train/loss" in row] == [str(step) for step in range(1, 6)]
    assert_same_run(run, alone, steps=5)
    assert ended.stdout.count("training begins") == 1


def test_a_process_that_dies_ends_the_others(killed):
    run, ended, when = killed
    assert ended.returncode == 1 and f"Signal {signal.SIGKILL.value}" in ended.stderr
    assert "[rank" not in ended.stderr and ended.stderr.count("ssm-trn: another process of the training ended") <= 1
    assert when - (run / "metrics.csv").stat().st_mtime < 30  # torchrun's patience with a process that hangs
    assert torch.load(last_checkpoint(run), weights_only=True)["global_step"] == 3


def test_another_number_of_processes_goes_on(killed, config, alone, tmp_path):
    """From one file, which FSDP2 wrote: alone, and with two processes by DDP, which is what they do by default."""
    for name in ("one", "two"):
        shutil.copytree(killed[0], tmp_path / name)
    words = ["fit", "--config", config, "--ckpt_path", "last", "--run_folder"]
    assert main([*words, str(tmp_path / "one")]) == 0
    assert (ended := torchrun(2, *words, str(tmp_path / "two"))).returncode == 0, ended.stderr
    assert "continues after step 3" in ended.stdout
    for name in ("one", "two"):
        assert_same_run(tmp_path / name, alone)
        assert_same_weights(tmp_path / name, alone)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in alone.iterdir()}


def test_fsdp2_exports_a_bfloat16_model(config, tmp_path):
    words = ["--trainer.precision", "bf16-true", "--trainer.max_steps", "3", "--trainer.accumulate_grad_batches", "1"]
    words += ["--model.init_args.config.tie_embeddings", "false", "--model.init_args.checkpoint_activations", "true"]
    words = ["fit", "--config", config, *words, "--run_folder"]
    assert main([*words, str(tmp_path / "one")]) == 0
    ended = torchrun(2, *words, str(tmp_path / "two"), "--trainer.strategy", "fsdp2")
    assert ended.returncode == 0, ended.stderr
    model, other = (LanguageModel.from_pretrained(tmp_path / name) for name in ("two", "one"))
    wide = float32_parameters(model)
    for name, value in model.named_parameters():
        assert value.dtype == (torch.float32 if name in wide else torch.bfloat16), name
        assert (value - other.get_parameter(name)).float().norm() < 0.01 * other.get_parameter(name).float().norm(), (
            name
        )
    losses = [
        [float(row["train/loss"]) for row in metrics(tmp_path / name) if "train/loss" in row] for name in ("one", "two")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_an_error_is_told_once(config, tmp_path):
    words = ["--data.init_args.batch_size", "3", "--run_folder", str(tmp_path / "run")]
    ended = torchrun(2, "fit", "--config", config, *words)
    assert ended.returncode == 1 and "[rank" not in ended.stderr  # as Python begins the lines of a traceback
    assert ended.stderr.count("batch_size 3 is not divisible by the 2 devices that share a batch") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--trainer.devices", "2"],
            "trainer.devices is 2 and trainer.num_nodes 1, but there is one process: start one",
        ),
        (["--trainer.num_nodes", "2"], "with torchrun --nproc_per_node 1 -m ssm_trn"),
        (["--trainer.devices", "none"], "trainer.devices is none: give the number of devices, or auto"),
    ],
)
def test_processes_are_torchruns_to_start(config, tmp_path, capsys, words, sentence):
    assert main(["fit", "--config", config, "--run_folder", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and sentence in error
    assert not (tmp_path / "run").exists()
