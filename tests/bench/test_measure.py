"""How a comparison is measured."""

import dataclasses
import sys
import time
from functools import partial

import pytest
import torch

from ssm_trn.bench.measure import OURS, Comparison, Side, Target, largest_difference, measure, peak_growth
from ssm_trn.bench.ops import OPS
from ssm_trn.timing import take_turns


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def build(length, peer_value=1.0, log=None):
    """Our side takes 1 ms and `length` bytes, the peer 10 ms and ten times as many."""

    def call(name, share, value):
        if log is not None:
            log.append((name, torch.get_num_threads()))
        burn(0.001 * share)
        memory = torch.ones(share * length, dtype=torch.uint8)
        return [memory[:1] * value]

    return {
        OURS: Side(lambda: call("ours", 1, 1.0), parameters=5),
        "peer": Side(lambda: call("peer", 10, peer_value)),
    }


MEBIBYTE = 2**20
COMPARISON = Comparison(build, 64, 5, (Target("a thing", "peer", 4),))


def test_the_ratio_is_what_the_peer_takes_over_what_we_take():
    (row,) = measure(COMPARISON)
    assert row["title"] == "a thing" and row["target_ratio"] == 4 and row["difference"] == 0
    assert 5 < row["ratio"] < 12 and row["lowest_ratio"] <= row["ratio"] <= row["highest_ratio"]
    assert len(row["ours"]["samples"]) == 5 and row["ours"]["parameters"] == 5
    assert row["ours"]["median"] == sorted(row["ours"]["samples"])[2]


def test_sides_take_turns_on_one_thread_after_a_warm_up_and_the_threads_come_back():
    log = []
    torch.set_num_threads(2)
    try:
        measure(dataclasses.replace(COMPARISON, build=partial(build, log=log)), rounds=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert [name for name, _ in log] == ["ours", "peer", "ours", "peer", "peer", "ours"]
    assert {threads for _, threads in log} == {1}


def test_turns_are_timed_one_by_one():
    now = [0.0]
    calls = {name: lambda step=step: now.__setitem__(0, now[0] + step) for name, step in (("a", 1), ("b", 2), ("c", 4))}
    assert take_turns(calls, 4, clock=lambda: now[0]) == {"a": [1] * 4, "b": [2] * 4, "c": [4] * 4}


@pytest.mark.parametrize("value", [1.001, float("nan")])
def test_sides_that_disagree_are_not_timed(value):
    log = []
    (row,) = measure(dataclasses.replace(COMPARISON, build=partial(build, peer_value=value, log=log)))
    assert row["not_measured"].startswith("the results differ by") and "ratio" not in row
    assert len(log) == 2


def test_the_largest_difference_is_over_all_results_and_relative():
    one = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    other = [torch.tensor([3.0, 5.0]), torch.tensor([0.8])]
    assert largest_difference({"a": one, "b": one}) == 0
    assert largest_difference({"a": one, "b": one, "c": other}) == pytest.approx(0.25)


def test_a_missing_library_costs_only_its_row():
    def build(length):
        import no_such_library  # noqa: F401

    (row,) = measure(dataclasses.replace(COMPARISON, build=build))
    assert "no_such_library" in row["not_measured"] and "ratio" not in row
    assert row["not_measured"].endswith("the extra 'dev' brings it")


def test_a_library_outside_the_extras_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlstm_kernels", None)
    (row,) = measure(dataclasses.replace(OPS["mlstm"], length=64))
    assert "pip install --no-deps mlstm_kernels" in row["not_measured"] and "'dev'" not in row["not_measured"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_what_one_call_adds_at_its_peak():
    comparison = dataclasses.replace(COMPARISON, length=8 * MEBIBYTE)
    assert abs(peak_growth(comparison, "peer") - 80 * MEBIBYTE) < MEBIBYTE  # counted in pages, some there already


def test_memory_is_not_measured_where_there_is_no_proc(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    targets = (*COMPARISON.targets, Target("its memory", "peer", 4, quantity="bytes"))
    time_row, memory_row = measure(dataclasses.replace(COMPARISON, targets=targets))
    assert "ratio" in time_row and "only Linux" in memory_row["not_measured"]
