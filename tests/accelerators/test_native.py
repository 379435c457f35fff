"""Which strategy and precision are chosen where PyTorch has a device "neuron": a fake one, which cannot compute."""

import subprocess
import sys

import pytest

# A process of its own, since a device that is registered stays.
SCRIPT = """
import os, sys
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("neuron")
import torch
torch.neuron.get_amp_supported_dtype = lambda: [torch.bfloat16]
from lightning.pytorch import Trainer
from ssm_trn.accelerators import *
import ssm_trn.training.sharding  # where the name fsdp2 comes from

def trainer(**settings):
    settings = {"logger": False, "enable_checkpointing": False} | settings
    return Trainer(**settings | trainer_settings(settings))

def refusal(**settings):
    try:
        trainer(**settings)
    except ValueError as error:
        return str(error)

print(flavour())
for settings in ({"accelerator": "neuron"}, {"accelerator": "auto"}, {}, {"precision": "bf16-mixed"}, {"devices": 1}):
    made = trainer(**settings)
    precision = made.precision_plugin
    print(type(made.accelerator).__name__, type(made.strategy).__name__, made.strategy.root_device, precision.precision,
          precision.device_type)
with trainer(precision="bf16-mixed").precision_plugin.forward_context():
    print(torch.is_autocast_enabled("neuron"), torch.get_autocast_dtype("neuron"))
print(type(trainer(accelerator="cpu").strategy).__name__, trainer(accelerator="cpu").strategy.root_device)
print(refusal(precision="16-mixed"))
print(refusal(devices=2))
print(refusal(strategy="ddp"))
print(refusal(detect_anomaly=True))
try:
    Trainer(accelerator="neuron", logger=False).strategy.setup_environment()
except ValueError as error:
    print(error)
os.environ |= {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "3", "GROUP_RANK": "1"}
os.environ |= {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
for settings in ({}, {"strategy": "fsdp2"}):
    made = trainer(**settings)
    print(type(made.strategy).__name__, made.strategy.root_device, made.world_size, made.global_rank, made.num_nodes)
print(trainer().strategy.process_group_backend, trainer().strategy.determine_ddp_device_ids())
"""


@pytest.fixture(scope="module")
def chosen():
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_the_device_is_found(chosen):
    assert chosen[0] == "native"


def test_the_strategy_trains_on_the_device(chosen):
    start = "NeuronAccelerator NativeStrategy neuron:0"
    assert chosen[1:4] == [f"{start} 32-true neuron"] * 3
    assert chosen[4] == f"{start} bf16-mixed neuron"
    assert chosen[5] == f"{start} 32-true neuron"


def test_mixed_precision_reaches_the_device(chosen):
    assert chosen[6] == "True torch.bfloat16"


def test_the_cpu_remains_a_choice(chosen):
    assert chosen[7] == "SingleDeviceStrategy cpu"


def test_what_cannot_be_done_is_refused(chosen):
    assert chosen[8].startswith("trainer.precision 16-mixed does not run on NeuronCores: choose one of 32-true")
    assert chosen[9].startswith("trainer.devices is 2") and "torchrun --nproc_per_node 2" in chosen[9]
    assert chosen[10] == "trainer.strategy ddp does not run on the device 'neuron': leave it out"
    assert chosen[11].startswith("trainer.detect_anomaly reads every tensor")


def test_a_strategy_that_lightning_chose_does_not_train_on_the_cpu(chosen):
    assert chosen[12].startswith("the strategy trains on cpu, not on NeuronCores")


def test_several_processes_share_the_batch(chosen):
    assert chosen[13] == "NativeDataParallelStrategy neuron:1 4 3 2"
    assert chosen[14] == "FullyShardedStrategy neuron:1 4 3 2"
    assert chosen[15] == "neuron None"
