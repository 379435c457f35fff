"""What ends a training before its time: signals, and numbers that are not finite."""

import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

from ssm_trn.data.datamodule import TrainingBatches
from ssm_trn.data.token_file import TokenFile
from ssm_trn.training import LanguageModelModule
from ssm_trn.training.checkpoints import last_checkpoint
from ssm_trn.training.faults import FiniteUpdates
from tests.training.processes import torchrun
from tests.training.runs import error_of, fit, go_on, same_run, saved_step
from tests.training.tiny import metrics

# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_told_to_stop_saves_and_says_so(config, undisturbed, tmp_path, at_step, capfd, number):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    at_step(4, lambda module: os.kill(os.getpid(), number))
    assert fit(config, tmp_path / "run") == 75
    assert "ssm-trn: told to stop after step 5; the same command goes on from there" in capfd.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == handlers
    assert saved_step(tmp_path / "run") == 5 and not (tmp_path / "run" / "model.safetensors").exists()
    at_step(4, lambda module: None)
    assert go_on(config, tmp_path / "run") == 0
    assert same_run(tmp_path / "run", undisturbed)


def test_a_run_that_is_told_to_stop_within_a_step_of_several_batches_ends_that_step(config, tmp_path, at_step):
    words = ["--trainer.accumulate_grad_batches", "3"]
    assert fit(config, tmp_path / "whole", *words) == 0
    at_step(4, lambda module: os.kill(os.getpid(), signal.SIGTERM))
    assert fit(config, tmp_path / "run", *words) == 75
    assert saved_step(tmp_path / "run") == 5
    at_step(4, lambda module: None)
    assert go_on(config, tmp_path / "run", *words) == 0
    assert same_run(tmp_path / "run", tmp_path / "whole")


def test_all_processes_stop_when_one_is_told(config, undisturbed, tmp_path):
    callback = {"class_path": "tests.training.kill.KillAfter", "init_args": {"step": 3, "rank": 1, "number": 15}}
    teller = tmp_path / "teller.yaml"
    teller.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback], "log_every_n_steps": 5}}))
    words = ["--config", config, "--config", str(teller), "--run_folder", str(tmp_path / "run")]
    ended = torchrun(2, "fit", *words)
    assert ended.stderr.count("ssm-trn: told to stop after step 5;") == 1, ended.stderr
    assert ended.returncode == 1  # torchrun's own, whatever failed; launch/torchrun.py tells of the processes'
    assert saved_step(tmp_path / "run") == 5


def test_a_run_that_is_told_to_stop_before_its_first_step_begins_anew(config, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        stop = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        patch.setattr(LanguageModelModule, "on_validation_epoch_start", stop)  # that before the training
        patch.setattr(LanguageModelModule, "on_validation_epoch_end", lambda module: None)
        assert fit(config, tmp_path / "run") == 75
    assert "told to stop before the first step; the same command begins anew" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


# Numbers that are not finite


def spoil(*steps):
    """A training step whose loss is not a number at these steps, counted from 1."""
    original = LanguageModelModule.training_step

    def training_step(module, batch, batch_idx):
        loss = original(module, batch, batch_idx)
        return loss * float("nan") if module.trainer.global_step + 1 in steps else loss

    return training_step


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(config, tmp_path, monkeypatch, capsys, accumulate):
    run, data = tmp_path / "run", yaml.safe_load(Path(config).read_text())["data"]["init_args"]["folder"]
    words = ["--trainer.accumulate_grad_batches", str(accumulate)]
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "training_step", spoil(5))
        assert fit(config, run, *words) == 2
    batches = TrainingBatches(TokenFile.open(data, "train"), block_length=16, batch_size=2, seed=0)
    blocks = [str(block) for batch in range(4 * accumulate, 5 * accumulate) for block in batches.blocks_of(batch)]
    error = error_of(capsys)
    assert f"the loss or a gradient of step 5 is not finite, its batch holds the blocks {', '.join(blocks)}, " in error
    assert f"the last good checkpoint is {last_checkpoint(run)}" in error and "skip_nonfinite_batches true" in error
    assert saved_step(run) == 3
    assert go_on(config, run, *words, "--model.init_args.skip_nonfinite_batches", "true") == 0  # the error's mend


def test_batches_that_are_not_finite_are_left_out_and_counted(config, tmp_path, monkeypatch):
    words = ["--model.init_args.skip_nonfinite_batches", "true"]
    weights = {}

    def record(module, outputs, batch, batch_idx):
        original(module, outputs, batch, batch_idx)
        optimizer = module.optimizers().state_dict()["state"].values()
        weights[module.trainer.global_step] = [
            *(parameter.detach().clone() for parameter in module.parameters()),
            *(value.clone() for state in optimizer for value in state.values()),
        ]

    original = LanguageModelModule.on_train_batch_end
    monkeypatch.setattr(LanguageModelModule, "training_step", spoil(4, 5, 7))
    monkeypatch.setattr(LanguageModelModule, "on_train_batch_end", record)
    assert fit(config, tmp_path / "run", *words) == 0
    counts = [float(row["skipped_batches"]) for row in metrics(tmp_path / "run") if "skipped_batches" in row]
    assert counts == [0, 0, 0, 1, 2, 2, 3, 3]
    unchanged = [
        step for step in range(2, 9) if all(map(torch.equal, weights[step], weights[step - 1])) and weights[step]
    ]
    assert unchanged == [4, 5, 7]
    assert all(torch.isfinite(value).all() for value in weights[8])


def test_the_count_of_left_out_batches_goes_on_with_the_run(config, tmp_path, monkeypatch, at_step):
    words = ["--model.init_args.skip_nonfinite_batches", "true"]
    monkeypatch.setattr(LanguageModelModule, "training_step", spoil(2, 8))
    assert fit(config, tmp_path / "whole", *words) == 0
    at_step(5, lambda module: os.kill(os.getpid(), signal.SIGTERM))
    assert fit(config, tmp_path / "run", *words) == 75
    at_step(5, lambda module: None)
    assert go_on(config, tmp_path / "run", *words) == 0
    assert same_run(tmp_path / "run", tmp_path / "whole")
    assert float(metrics(tmp_path / "run")[-2]["skipped_batches"]) == 2


def test_a_device_that_is_not_waited_for_takes_a_gradient_of_zero(monkeypatch):
    """What happens where no step may wait: nothing that is not finite gets in, and `read` tells of it later."""
    monkeypatch.setattr(FiniteUpdates, "_is_known", staticmethod(lambda tensor: False))
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)

    class Progress:
        global_step, accumulate_grad_batches = 0, 1
        datamodule = checkpoint_callback = ckpt_path = None

    skipping, stopping = FiniteUpdates(skip=True), FiniteUpdates(skip=False)
    for step, worst in enumerate((1.0, float("inf"), float("nan"), 2.0)):
        Progress.global_step = step
        parameters[0].grad, parameters[1].grad = torch.tensor([1.0, worst]), torch.ones(3)
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for updates in (skipping, stopping):
            updates.check(parameters, norm, Progress)
        optimizer.step()
        assert (parameters[0].grad == 0).all() == (step in (1, 2))
    assert all(torch.isfinite(parameter).all() for parameter in parameters)
    skipping.read(Progress)
    assert skipping.skipped == 2
    with pytest.raises(ValueError, match="of step 2 is not finite, the weights have been kept from it, and there"):
        stopping.read(Progress)
