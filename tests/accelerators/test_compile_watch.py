"""When the compile watch speaks, and what it says: torch-xla's counters are played here."""

from types import SimpleNamespace

import pytest
import torch

from ssm_trn.accelerators import CompileWatch, compile_watch
from ssm_trn.accelerators.compile_watch import Counters


class Training:
    """Goes through the hooks of a Trainer; each argument `graphs` is what is compiled during the call."""

    def __init__(self, monkeypatch, **options):
        monkeypatch.setattr(compile_watch.Counters, "now", lambda: self.counters)
        self.counters = Counters(0, 0, 0, ())
        self.watch = CompileWatch(**options)
        self.group = {"lr": 0.1}
        optimizers = [SimpleNamespace(param_groups=[self.group])]
        self.trainer = SimpleNamespace(global_step=0, log_every_n_steps=100, optimizers=optimizers, is_global_zero=True)
        self.watch.setup(self.trainer, None, "fit")
        self.watch.on_train_start(self.trainer, None)

    def compile(self, graphs):
        self.counters = self.counters._replace(compilations=self.counters.compilations + graphs)

    def step(self, graphs=0, length=16):
        batch, number = {"tokens": torch.zeros(2, length, dtype=torch.int64)}, self.trainer.global_step
        self.watch.on_train_batch_start(self.trainer, None, batch, number)
        self.compile(graphs)
        self.trainer.global_step += 1
        self.watch.on_train_batch_end(self.trainer, None, None, batch, number)

    def validate(self, graphs=(1, 0), lengths=(16, 16)):
        for number, (new, length) in enumerate(zip(graphs, lengths, strict=True)):
            batch = {"tokens": torch.zeros(2, length, dtype=torch.int64)}
            self.watch.on_validation_batch_start(self.trainer, None, batch, number)
            self.compile(new)
            self.watch.on_validation_batch_end(self.trainer, None, None, batch, number)
        self.watch.on_validation_end(self.trainer, None)


@pytest.fixture
def training(monkeypatch):
    training = Training(monkeypatch)
    for graphs in (2, 1, 0, 1):
        training.step(graphs)
    return training


def test_the_first_steps_may_compile(training, caplog):
    training.step()
    assert not caplog.messages


def test_a_batch_of_another_shape_is_named(training, caplog):
    training.step()
    training.step(1, length=12)
    assert caplog.messages == [
        "1 new graph compiled in training batch 5, after the warm-up: "
        "tokens is int64 [2, 12] and was int64 [2, 16] before"
    ]
    training.step(0)
    training.step(0, length=12)
    assert len(caplog.messages) == 1


def test_a_graph_without_a_change_of_shapes_is_told_too(training, caplog):
    training.step(2)
    assert "2 new graphs compiled in training batch 4" in caplog.text and "all its shapes are as before" in caplog.text


@pytest.mark.parametrize("rate", [0, 1])
def test_the_learning_rates_that_are_constants_are_named(training, caplog, rate):
    training.group["lr"] = rate
    training.step(1)
    assert f"the learning rate is {rate}, and 0 and 1 are built into the graph" in caplog.text


def test_the_first_validation_may_compile_a_graph(training, caplog):
    training.validate()
    training.step()
    training.validate(graphs=(0, 0))
    training.step()
    assert not caplog.messages


def test_a_ragged_validation_is_named(training, caplog):
    training.validate(graphs=(1, 1), lengths=(16, 7))
    assert "in validation batch 1" in caplog.text and "tokens is int64 [2, 7] and was int64 [2, 16]" in caplog.text


def test_what_happens_between_steps_may_compile_once(training, caplog):
    training.step()
    for number in range(2):
        training.watch.on_save_checkpoint(training.trainer, None, {})
        training.compile(1)
        training.step()
        assert len(caplog.messages) == number
    assert "before training batch 6" in caplog.text and "a checkpoint between two steps asked for it" in caplog.text


def test_a_callback_that_compiles_is_told(training, caplog):
    training.step()
    training.compile(1)
    training.step()
    assert "before training batch 5" in caplog.text and "something else between two steps" in caplog.text


def test_it_can_end_the_training(monkeypatch):
    training = Training(monkeypatch, warmup_steps=1, fail=True)
    training.step(2)
    with pytest.raises(ValueError, match="3 new graphs compiled in training batch 1"):
        training.step(3)


def test_operations_that_fall_back_to_the_cpu_are_named_once(training, caplog):
    training.counters = training.counters._replace(fallbacks=("aten::nonzero",))
    training.step()
    training.step()
    assert caplog.messages == ["XLA has no form of aten::nonzero: it runs on the CPU, at every step"]
