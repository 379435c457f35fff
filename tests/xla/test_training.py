"""Training on XLA devices: the numbers of a CPU, a few graphs and no more, for three families of models."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import XLAAccelerator

from ssm_trn.accelerators import NeuronAccelerator, SingleCoreStrategy
from ssm_trn.cli import main
from ssm_trn.layers import float32_parameters
from ssm_trn.training.checkpoints import last_checkpoint
from tests.training.tiny import prepare_data, write_config
from tests.xla.training import LOGGED, fit, losses, seen_by

MODELS = {
    "mamba2": ["mamba2"],
    "gated_deltanet": ["gated_deltanet"],
    "transformer": [{"mixer": "attention", "window": 8}],
}
BRIEF = ("--trainer.max_steps", "4", "--trainer.limit_val_batches", "0")

pytestmark = pytest.mark.xla


class Case:
    """One model, trained for 8 steps on a CPU and on an XLA device with a validation after 4 and after 8."""

    def __init__(self, name, folder):
        self.folder = folder
        self.config = write_config(folder / "config.yaml", prepare_data(folder), MODELS[name])
        fit(self.config, folder / "cpu", "cpu")
        self.on_device = fit(self.config, folder / "device", "neuron")


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def assert_equal(folder, expected, tolerance, names=LOGGED):
    found, expected = losses(folder, names), losses(expected, names)
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    for (step, name, value), (*_, wanted) in zip(found, expected, strict=True):
        assert abs(value - wanted) < tolerance, (step, name, value, wanted)


def test_every_step_has_the_loss_of_the_cpu(case):
    assert len([row for row in losses(case.folder / "device") if row[1] == "train/loss"]) == 8
    assert_equal(case.folder / "device", case.folder / "cpu", 1e-4)


def test_the_weights_are_those_of_the_cpu(case):
    """As a whole: where a gradient is next to nothing, AdamW makes a step of its rounding."""
    expected = torch.load(last_checkpoint(case.folder / "cpu"), weights_only=True)["state_dict"]
    found = torch.load(last_checkpoint(case.folder / "device"), weights_only=True)["state_dict"]
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.device.type == "cpu"
        assert (value - expected[name]).norm() < 1e-3 * expected[name].norm(), name


def test_the_graphs_are_all_there_after_step_4(case):
    seen = seen_by(case.on_device)
    assert len(seen) == 8
    assert len({after.compilations for _, after in seen[3:]}) == 1
    for step in (5, 6, 8):  # steps 4 and 7 begin with the checkpoint of the step before
        before, after = seen[step - 1]
        assert after.executions == before.executions + 1  # forward, backward, clipping and update in one
        assert after.reads == before.reads
    assert seen[-1][1].fallbacks == ()


def test_validate_gives_what_the_training_saw(case, capsys):
    trained = [row for row in losses(case.folder / "device") if row[1] == "validation/loss"]
    words = ["--config", case.config, "--run_folder", str(case.folder / "device"), "--trainer.accelerator", "neuron"]
    assert main(["validate", *words]) == 0
    assert f"{trained[-1][2]:.6f}"[:6] in capsys.readouterr().out


def test_a_run_that_is_resumed_gives_the_same_numbers(case):
    """It fails in step 5, with a checkpoint of step 3."""
    folder = case.folder / "resumed"
    with pytest.raises(RuntimeError, match="as the test wants it"):
        fit(case.config, folder, "neuron", witness="--trainer.callbacks.fail_at=5")
    command = fit(case.config, folder, "neuron", "--ckpt_path", "last")
    assert len(seen_by(command)) == 5
    assert losses(folder) == losses(case.folder / "device")


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bfloat16(case, precision):
    words = (*BRIEF, "--trainer.precision", precision)
    fit(case.config, case.folder / f"{precision} cpu", "cpu", *words)
    module = fit(case.config, case.folder / precision, "neuron", *words).model
    assert_equal(case.folder / precision, case.folder / f"{precision} cpu", 5e-2, ["train/loss"])
    wide = float32_parameters(module.model) if precision == "bf16-true" else dict(module.model.named_parameters())
    for name, parameter in module.model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in wide else torch.bfloat16), name


def test_accumulated_gradients(case):
    words = (*BRIEF, "--trainer.max_steps", "6", "--trainer.accumulate_grad_batches", "2")
    fit(case.config, case.folder / "accumulated cpu", "cpu", *words)
    command = fit(case.config, case.folder / "accumulated", "neuron", *words, "--data.init_args.num_workers", "1")
    assert_equal(case.folder / "accumulated", case.folder / "accumulated cpu", 1e-4)
    seen = seen_by(command)[7:]  # from the last batch of step 4 on; the second batch of a step updates the weights too
    assert [after.executions - before.executions for before, after in seen] == [2, 1, 2, 1, 2]
    assert len({after.compilations for _, after in seen}) == 1


def test_a_ragged_batch_is_caught(tmp_path, capsys):
    config = write_config(tmp_path / "config.yaml", prepare_data(tmp_path), MODELS["transformer"])
    words = ["--run_folder", str(tmp_path / "run"), "--data", "tests.xla.training.Ragged"]
    words += ["--trainer.accelerator=neuron", "--trainer.limit_val_batches=0"]
    words += ["--trainer.callbacks+=ssm_trn.accelerators.CompileWatch", "--trainer.callbacks.fail=true"]
    assert main(["fit", "--config", config, *words]) == 2
    message = capsys.readouterr().err
    assert "compiled in training batch 5" in message
    assert "tokens is int64 [2, 12] and was int64 [2, 16] before" in message


def test_tied_weights_stay_one():
    module = LightningModule()
    module.first, module.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    module.second.weight = module.first.weight
    strategy = SingleCoreStrategy(accelerator=NeuronAccelerator())
    strategy.connect(module)
    strategy.model_to_device()
    assert module.second.weight is module.first.weight and module.first.weight.device.type == "xla"
    strategy.teardown()
    assert module.second.weight is module.first.weight and module.first.weight.device.type == "cpu"


def test_nobody_is_asked_for_tpus(monkeypatch):
    asked = []
    monkeypatch.setattr("requests.get", lambda *words, **_: asked.append(words))
    XLAAccelerator.is_available.cache_clear()
    XLAAccelerator.auto_device_count.cache_clear()
    assert not XLAAccelerator.is_available() and not asked
