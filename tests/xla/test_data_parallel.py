"""Two processes on XLA devices, which torchrun starts: they do what one process does on a CPU.

Their sums go through gloo, as torch-xla's CPU client has none; what a NeuronCore does instead is `OnDevice`.
"""

import inspect

import pytest
import torch
from torch import distributed

from ssm_trn.accelerators.collectives import OnDevice
from ssm_trn.cli import main
from ssm_trn.training.checkpoints import last_checkpoint
from tests.training.processes import assert_same_run, assert_same_weights, torchrun, write_packed_config

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # a third of the time to compile
LAYERS = ({"mixer": "mamba2", "feed_forward": "none"},)
STEPS = ("--trainer.max_steps", "5", "--trainer.val_check_interval", "5")

pytestmark = [pytest.mark.xla, pytest.mark.xdist_group("data_parallel")]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_packed_config(tmp_path_factory.mktemp("data"), layers=LAYERS)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """A run of one process on a CPU."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    assert main(["fit", "--config", config, *STEPS, "--run_folder", str(run), "--trainer.accelerator", "cpu"]) == 0
    return run


@pytest.fixture(scope="module")
def together(config, alone):
    return fit(config, alone.parent / "together")


def fit(config, run, *words):
    words = ["fit", "--config", config, *STEPS, "--run_folder", str(run), "--trainer.accelerator", "neuron", *words]
    ended = torchrun(2, *words, SSM_TRN_NEURON="xla-cpu", PJRT_DEVICE="CPU", XLA_FLAGS=QUICK)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained to step 5") == 1
    return run


def test_two_processes_do_what_one_does(together, alone):
    assert_same_run(together, alone)
    assert_same_weights(together, alone)


def test_a_sharded_optimizer_goes_on_and_saves_the_same(config, together, alone, tmp_path):
    """From the checkpoint of step 3 that the whole optimizer left: both end with the same checkpoint."""
    words = ["--trainer.strategy", "zero1", "--ckpt_path", str(together / "checkpoints" / "previous.ckpt")]
    run = fit(config, tmp_path / "sharded", *words)
    assert_same_weights(run, alone)
    ours, others = (torch.load(last_checkpoint(folder), weights_only=True) for folder in (run, together))
    ours, others = (checkpoint["optimizer_states"][0] for checkpoint in (ours, others))
    assert ours["param_groups"] == others["param_groups"] and ours["state"].keys() == others["state"].keys()
    for index, state in ours["state"].items():
        for name, value in state.items():
            assert value.device.type == "cpu"
            torch.testing.assert_close(value, others["state"][index][name], rtol=0, atol=1e-6)


def test_the_collectives_of_the_device_are_called_as_torch_xla_defines_them(tmp_path):
    """One process is its own sum; that several are summed, only a machine with NeuronCores can tell."""
    import torch_xla
    from torch_xla.core import xla_model

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        on_device = OnDevice()
        x = torch.arange(6.0, device=torch_xla.device())
        assert torch.equal(on_device.reduce_scatter(x, 0.5).cpu(), torch.arange(6.0) / 2)
        assert torch.equal(on_device.all_gather(x).cpu(), torch.arange(6.0))
        on_device.all_reduce([x])
        assert torch.equal(x.cpu(), torch.arange(6.0))
    finally:
        distributed.destroy_process_group()
    names = {"gradients", "scale", "groups", "pin_layout", "bucket_cap_mb"}
    assert names == set(inspect.signature(xla_model.all_reduce_bucketized_gradients).parameters)
