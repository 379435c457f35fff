"""What is found, what is looked for, and what is said where nothing is there."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ssm_trn.accelerators import absence, detect, flavour
from ssm_trn.cli import main


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(detect.VARIABLE, raising=False)
    detect._find.cache_clear()
    yield
    detect._find.cache_clear()


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """As if the kernel's driver were there."""
    (tmp_path / "neuron0").touch()
    monkeypatch.setattr(detect, "FIRST_DEVICE", tmp_path / "neuron0")


def install(monkeypatch, tmp_path, name, source=""):
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_nothing_is_there():
    assert flavour() is None
    assert "no device 'neuron'" in absence() and "there is no /dev/neuron0" in absence()


@pytest.mark.parametrize("name", detect.FLAVOURS)
def test_the_variable_decides(monkeypatch, name):
    monkeypatch.setenv(detect.VARIABLE, name)
    assert flavour() == name


def test_a_wrong_variable_is_told(monkeypatch):
    monkeypatch.setenv(detect.VARIABLE, "trn1")
    with pytest.raises(ValueError, match="SSM_TRN_NEURON is 'trn1': make it one of native, xla, xla-cpu"):
        flavour()


def test_torch_neuron_is_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="neuron"))
    assert flavour() == "native"


def test_the_driver_and_both_packages_are_trn1(monkeypatch, tmp_path, driver):
    install(monkeypatch, tmp_path, "torch_xla")
    install(monkeypatch, tmp_path, "torch_neuronx")
    assert flavour() == "xla"


def test_a_placeholder_of_the_package_index_is_none(monkeypatch, tmp_path, driver):
    install(monkeypatch, tmp_path, "torch_xla")
    install(monkeypatch, tmp_path, "torch_neuronx", "raise ImportError('WRONG PACKAGE, take the other index')")
    assert flavour() is None
    assert "torch_neuronx cannot be imported (ImportError: WRONG PACKAGE, take the other index)" in absence()


def test_without_torch_xla_the_driver_is_not_enough(monkeypatch, driver):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert flavour() is None
    assert "torch_xla cannot be imported" in absence()


@pytest.mark.parametrize(
    "name, missing", [("native", "device 'neuron' in PyTorch"), ("xla", "torch_xla"), ("xla-cpu", "torch_xla")]
)
def test_a_flavour_that_is_not_installed_is_told(monkeypatch, name, missing):
    monkeypatch.setenv(detect.VARIABLE, name)
    monkeypatch.setattr(detect, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"SSM_TRN_NEURON is '{name}', and there is no {missing}: install it as"):
        detect.choose_runtime()


def test_the_runtime_is_that_of_the_flavour(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "torch_xla")
    monkeypatch.setenv(detect.VARIABLE, "xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ValueError, match="PJRT_DEVICE is CPU, and the flavour xla needs NEURON: unset it"):
        detect.choose_runtime()


def test_the_command_says_in_one_sentence_that_there_is_no_core(tmp_path, capsys):
    """Rather than train on the CPU, as Lightning would; and no folder of a run is left."""
    words = ["fit", "--config", "experiments/mamba2_2m_sotu.yaml", "--run_folder", str(tmp_path / "run")]
    assert main([*words, "--trainer.accelerator", "neuron"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("ssm-trn: error: there is no NeuronCore to train on: ") and message.count("\n") == 1
    assert "choose --trainer.accelerator cpu, or install the Neuron SDK as docs/trainium.md says" in message
    assert not (tmp_path / "run").exists()
