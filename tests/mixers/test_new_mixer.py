"""docs/adding_a_mixer.md does what it says."""

import re
from pathlib import Path

import pytest

from ssm_trn import mixers

from . import test_properties as properties
from .cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_mixer.md"


@pytest.fixture
def page(monkeypatch):
    """The names that the page's code leaves behind. Its mixer and case are gone after the test."""
    monkeypatch.setattr(mixers, "_MIXERS", dict(mixers._MIXERS))
    monkeypatch.setitem(CASES, "leaky_memory", None)
    names = {"CASES": CASES}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_the_page_trains_and_decodes_its_mixer(page):
    assert len(page["losses"]) == 20
    assert page["losses"][-1] < 0.2 * page["losses"][0]
    assert page["generated"] == [3, 1, 4, 1, 5] * 2


def test_the_mixer_of_the_page_has_the_properties_of_all(page):
    properties.test_any_split_equals_one_pass("leaky_memory", (0, 1, 64, 67, 130), preallocated=True)
    for kind in properties.masks(4):
        properties.test_a_masked_run_equals_the_run_without_the_masked_steps("leaky_memory", kind, with_reset=True)
    for check in (
        properties.test_step_by_step_equals_one_pass_with_steps_of_one_shape,
        properties.test_resets_equal_separate_runs,
        properties.test_gradients_pass_through_the_state,
        properties.test_bfloat16_keeps_gates_and_states_in_float32,
        properties.test_state_size_counts_what_is_remembered,
    ):
        check("leaky_memory")
