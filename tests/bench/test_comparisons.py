"""Each comparison in a small size: both sides run and compute the same thing."""

import pytest
import torch

from ssm_trn.bench import step
from ssm_trn.bench.measure import LARGEST_DIFFERENCE, largest_difference
from ssm_trn.bench.ops import OPS
from ssm_trn.bench.step import STEPS, model_config
from ssm_trn.config import LayerConfig, ModelConfig

PEERS = {"recurrent loop": None, "F.conv1d": None, "mambapy": "mambapy", "transformers": "transformers"}
PEERS |= {"Llama": "transformers", "mlstm_kernels": "mlstm_kernels"}


def require(comparison):
    for target in comparison.targets:
        if library := PEERS[target.peer]:
            pytest.importorskip(library, reason=f"needs {library}")


def results_of(sides):
    return {name: list(side.call()) for name, side in sides.items()}


@pytest.mark.parametrize("name", OPS)
def test_ops_agree_with_their_peers_in_outputs_and_gradients(name):
    require(OPS[name])
    torch.manual_seed(0)
    results = results_of(OPS[name].build(70))
    assert len(next(iter(results.values()))) >= 4
    assert largest_difference(results) < LARGEST_DIFFERENCE


@pytest.fixture
def small_models(monkeypatch):
    """Models of two layers in place of those with 10 million parameters, and short decoding."""

    def small(mixer, feed_forward=True):
        feed_forward = "swiglu" if feed_forward else "none"
        return ModelConfig(64, 64, [{"mixer": mixer, "feed_forward": feed_forward}] * 2)

    monkeypatch.setattr(step, "model_config", small)
    monkeypatch.setattr(step, "VOCABULARY", 64)
    monkeypatch.setattr(step, "DECODED_TOKENS", 3)


@pytest.mark.parametrize("name", STEPS)
def test_models_run_beside_their_peers_and_twins_agree(name, small_models):
    comparison = STEPS[name]
    require(comparison)
    torch.manual_seed(0)
    sides = comparison.build(70)
    results = results_of(sides)
    if comparison.same:
        assert largest_difference(results) < LARGEST_DIFFERENCE
        assert len({side.parameters for side in sides.values()}) == 1
    for target in comparison.targets:
        assert {target.ours, target.peer} <= sides.keys()
    results_of(sides)  # each can run again
    length = 1 if name.startswith("decode") else 70
    assert all(logits.shape == (1, length, 64) for (logits,) in results.values())


def test_twins_train_alike(small_models):
    pytest.importorskip("transformers", reason="needs transformers, of '.[dev]'")
    torch.manual_seed(0)
    peer, ours = step.twins(step.model_config("mamba2", feed_forward=False))
    tokens = torch.randint(64, (1, 71))
    before = ours(tokens[:, :-1])[0]
    sides = {
        "ours": step.training_side(ours, lambda tokens: ours(tokens)[0], tokens),
        "peer": step.training_side(peer, lambda tokens: peer(tokens).logits, tokens),
    }
    for _ in range(30):
        results = results_of(sides)
    assert (results["ours"][0] - before).norm() > 1e-4 * before.norm()  # they have learnt something
    assert largest_difference(results) < LARGEST_DIFFERENCE


def test_peers_decode_from_the_same_place_again(small_models):
    pytest.importorskip("transformers", reason="needs transformers, of '.[dev]'")
    torch.manual_seed(0)
    sides = step.decode_beside_llama(("Mamba, with feed-forward",), 20)
    first, second = results_of(sides), results_of(sides)
    for name in sides:
        assert torch.equal(first[name][0], second[name][0])


def test_models_have_the_same_size_to_within_a_percent():
    models = [("attention", True), *step.RIVALS.values()]
    counts = [model_config(*model).parameter_count() for model in models]
    assert all(abs(count / step.PARAMETERS - 1) < 0.01 for count in counts)


def test_the_block_with_feed_forward_is_what_a_mixer_by_its_name_gives():
    for title, (mixer, feed_forward) in step.RIVALS.items():
        layers = model_config(mixer, feed_forward).layers
        assert ("with feed-forward" in title) == feed_forward == (layers[0] == LayerConfig.of(mixer))
