"""Graphs on an XLA device without kernels: small, of operations that XLA has, for every mixer; and right."""

import pytest
import torch

from ssm_trn import mixers
from ssm_trn.accelerators.detect import xla_device
from ssm_trn.accelerators.graphs import graph_of
from ssm_trn.bench import graphs
from ssm_trn.config import ModelConfig
from ssm_trn.model import LanguageModel

pytestmark = pytest.mark.xla


@pytest.mark.parametrize("mixer", graphs.MIXERS)
def test_the_graph_of_a_training_step_grows_less_than_twofold_from_512_to_2048_steps(mixer):
    rows = [graphs.measure_one(mixer, length, compiled=False) for length in (512, 2048)]
    assert graphs.growth(rows, mixer) < 2
    assert all(row["fallbacks"] == () for row in rows)


@pytest.mark.parametrize("mixer", mixers.names())
def test_no_operation_of_a_mixer_leaves_the_device(mixer):
    """In a training step over documents, and in a decode step after a padded prompt."""
    device = xla_device()
    model = LanguageModel(ModelConfig(16, 64, [mixer])).to(device)
    tokens = torch.randint(16, (2, 70)).to(device)
    reset, mask = (torch.rand(2, length).to(device) < 0.5 for length in (70, 8))

    def train():
        logits, _ = model(tokens, reset=reset)
        return torch.autograd.grad(logits.square().mean(), list(model.parameters()), materialize_grads=True)

    def generate():
        with torch.no_grad():
            _, state = model(tokens[:, :8], state=model.init_state(2, 16, device, torch.float32), mask=mask)
            return [model(tokens[:, :1], state=state)[0]]

    graph = graph_of(train, compiled=False)
    assert graph.fallbacks == ()
    assert graph.instructions < 5000
    assert graph_of(generate, compiled=False).fallbacks == ()
