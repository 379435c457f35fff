"""A tiny run, and a way to disturb one."""

import pytest

from ssm_trn.training import LanguageModelModule
from tests.training.runs import fit
from tests.training.tiny import prepare_data, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_config(folder / "config.yaml", prepare_data(folder))


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    """The folder of a run of 8 steps that nothing interrupted."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert fit(config, run) == 0
    return run


@pytest.fixture
def at_step(monkeypatch):
    """Has something happen at the start of the training step after `step`."""
    original = LanguageModelModule.on_train_batch_start

    def set_up(step, happen):
        def on_train_batch_start(module, batch, batch_idx):
            original(module, batch, batch_idx)
            if module.trainer.global_step == step:
                happen(module)

        monkeypatch.setattr(LanguageModelModule, "on_train_batch_start", on_train_batch_start)

    return set_up
