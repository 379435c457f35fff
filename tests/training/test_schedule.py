import math

import pytest

from ssm_trn.training import learning_rate_ratio


def ratios(warmup_steps, total_steps, final_ratio, steps):
    return [learning_rate_ratio(step, warmup_steps, total_steps, final_ratio) for step in steps]


def test_warm_up_is_linear_and_never_zero():
    assert ratios(4, 100, 0.1, range(4)) == [0.25, 0.5, 0.75, 1.0]


def test_cosine_from_the_peak_to_the_final_ratio():
    assert learning_rate_ratio(4, 4, 104, 0.1) == 1.0
    assert learning_rate_ratio(54, 4, 104, 0.1) == pytest.approx(0.55, abs=1e-15)
    assert learning_rate_ratio(29, 4, 104, 0.2) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)), abs=1e-15)
    assert ratios(4, 104, 0.1, [104, 105, 10_000]) == pytest.approx([0.1] * 3, abs=1e-15)


def test_cosine_falls_at_each_step():
    values = ratios(10, 200, 0.0, range(9, 201))
    assert all(later <= earlier for earlier, later in zip(values, values[1:], strict=False))
    assert values[2:] == sorted(set(values[2:]), reverse=True)


def test_final_ratio_1_is_a_constant():
    assert ratios(0, 50, 1.0, range(60)) == [1.0] * 60


def test_no_warm_up_and_a_training_that_is_all_warm_up():
    assert learning_rate_ratio(0, 0, 10, 0.1) == 1.0
    assert ratios(5, 5, 0.1, range(5)) == [0.2, 0.4, 0.6, 0.8, 1.0]
