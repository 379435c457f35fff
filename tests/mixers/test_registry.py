"""Mixers by name, those of the user's own files among them."""

import pytest
import torch

from ssm_trn import mixers
from ssm_trn.mixers.base import Mixer

OWN = """
from ssm_trn.mixers import register
from ssm_trn.mixers.base import Mixer


@register("{name}")
class Own(Mixer):
    def __init__(self, d_model: int, width: int = 3):
        super().__init__()
"""


@pytest.fixture
def unregistered(monkeypatch):
    monkeypatch.setattr(mixers, "_MIXERS", dict(mixers._MIXERS))


def test_a_mixer_in_a_file_of_ones_own(tmp_path, monkeypatch, unregistered):
    (tmp_path / "own_mixers_of_a_test.py").write_text(OWN.format(name="own_mixer"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="unknown mixer 'own_mixer': .* or name its module in SSM_TRN_MIXERS"):
        mixers.get("own_mixer")
    monkeypatch.setenv("SSM_TRN_MIXERS", " own_mixers_of_a_test, ")
    assert mixers.get("own_mixer").__name__ == "Own"
    assert "own_mixer" in mixers.names()


def test_a_module_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("SSM_TRN_MIXERS", "no_such_module")
    with pytest.raises(ValueError, match="SSM_TRN_MIXERS names 'no_such_module', .* on PYTHONPATH"):
        mixers.get("own_mixer")
    assert mixers.get("mamba2")


def test_what_a_mixer_lacks_is_named(unregistered):
    class Half(Mixer):
        """Neither forward nor init_state."""

    with pytest.raises(NotImplementedError, match="Half does not define forward"):
        Half()(torch.zeros(1, 2, 4))
    with pytest.raises(NotImplementedError, match="Half does not define init_state"):
        Half().state_size(8)


def test_a_name_is_given_once(unregistered):
    with pytest.raises(ValueError, match="a mixer 'mamba2' already"):
        mixers.register("mamba2")(mixers.Mixer)
