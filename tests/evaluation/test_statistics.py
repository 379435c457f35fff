"""Means over seeds and their intervals."""

import numpy as np
import pytest

from ssm_trn.evaluation.statistics import mean_of


def test_interval_is_students():
    mean = mean_of([1.0, 2.0, 3.0])
    assert mean.value == 2 and mean.half_width == pytest.approx(4.302653 / 3**0.5)  # t of 2 degrees of freedom
    assert not mean.differs_from_zero and mean_of([2.0, 2.1, 1.9]).differs_from_zero
    assert mean_of([-2.0, -2.1, -1.9]).differs_from_zero


def test_a_single_value_has_no_interval():
    mean = mean_of([5.0], [0.1])
    assert (mean.value, mean.low, mean.high, mean.n) == (5.0, None, None, 1)
    assert mean.half_width == 0 and not mean.differs_from_zero


def test_what_more_seeds_cannot_mend_is_added():
    assert mean_of([1.0, 1.0], [0.3, 0.3]).half_width == pytest.approx(0.3)
    seeds = mean_of([1.0, 2.0, 4.0]).half_width
    assert mean_of([1.0, 2.0, 4.0], [0.5] * 3).half_width == pytest.approx(np.hypot(seeds, 0.5))


def test_intervals_hold_the_truth_as_often_as_they_say():
    generator = np.random.default_rng(0)
    means = [mean_of(list(generator.normal(3.0, 1.0, size=3))) for _ in range(2000)]
    held = np.mean([mean.low <= 3.0 <= mean.high for mean in means])
    assert held == pytest.approx(0.95, abs=0.015)
