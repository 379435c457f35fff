"""`ssm-trn bench` from the command line to results.json, a table and a plot."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest

from ssm_trn.bench import command, report
from ssm_trn.bench.measure import Comparison, Target
from ssm_trn.bench.ops import OPS, ssd
from ssm_trn.cli import main

SMALL = {name: replace(OPS[name], length=24) for name in ("gla", "short_conv")}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(command.COMPARISONS, "ops", SMALL)
    monkeypatch.setitem(command.COMPARISONS, "step", {})


def read(folder):
    return json.loads((folder / "results.json").read_text())


def test_results_table_and_plot_are_written(small, tmp_path, capsys):
    assert main(["bench", "ops", "--rounds", "2", "--output", str(tmp_path)]) == 0
    results = read(tmp_path)
    assert results["format_version"] == 1 and results["machine"]["threads"] == 1
    assert list(results["comparisons"]) == ["gla", "short_conv"]
    (row,) = results["comparisons"]["gla"]
    assert row["target_ratio"] == 4 and len(row["ours"]["samples"]) == len(row["peer"]["samples"]) == 2
    text = (tmp_path / "report.md").read_text()
    assert report.table(results) in text and report.table(results) in capsys.readouterr().out
    assert "<svg" in (tmp_path / "ratios.svg").read_text() and "ratios.svg" in text
    (tmp_path / "report.md").unlink()
    report.main([str(tmp_path / "results.json")])
    assert (tmp_path / "report.md").read_text() == text


def test_rows_measured_now_take_the_place_of_their_like_and_others_stay(small, tmp_path):
    for rows in ("short_conv", "gla,short_conv", "gla"):
        before = read(tmp_path)["comparisons"] if (tmp_path / "results.json").exists() else {}
        assert main(["bench", "ops", "--rows", rows, "--rounds", "1", "--output", str(tmp_path)]) == 0
        after = read(tmp_path)["comparisons"]
        for name in before:
            assert (after[name] != before[name]) == (name in rows)
    assert list(after) == ["gla", "short_conv"]


def test_the_table_tells_what_is_met_and_what_was_not_measured(small, tmp_path):
    row = {"title": "a", "length": 2048, "against": "peer", "quantity": "seconds", "target_ratio": 2.0}
    row |= {"lowest_ratio": 1.8, "highest_ratio": 2.5, "ours": {"median": 0.01, "parameters": None}}
    row["peer"] = {"median": 0.02, "parameters": None}
    memory = {**row, "quantity": "bytes", "ours": {"median": 2**20, "parameters": 7}}
    memory["peer"] = {"median": 3 * 2**30, "parameters": 8}
    missing = {"title": "b", "length": 8, "against": "peer", "target_ratio": 4, "not_measured": "no such library"}
    results = {"comparisons": {"x": [{**row, "ratio": 2.0}, {**row, "ratio": 1.99}], "y": [missing]}}
    results["comparisons"]["z"] = [{**memory, "ratio": 3072.0}]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.table(results).splitlines()[2:]]
    assert lines == [
        ["a", "2,048", "peer", "2x", "2.00x (1.80 to 2.50)", "yes", "10.0 ms", "20.0 ms", ""],
        ["a", "2,048", "peer", "2x", "1.99x (1.80 to 2.50)", "no", "10.0 ms", "20.0 ms", ""],
        ["b", "8", "peer", "4x", "not measured", "no", "no such library", "", ""],
        ["a", "2,048", "peer", "2x", "3072.00x", "yes", "1 MiB", "3,072 MiB", "7 / 8"],
    ]
    report.plot_ratios(results, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").exists()


def test_rows_of_libraries_that_are_missing_say_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    targets = (Target("SSD", "transformers", 2), Target("its memory", "transformers", 2, quantity="bytes"))
    lacking = Comparison(partial(ssd, heads=2, channels=4, states=4), 24, 1, targets)
    monkeypatch.setitem(command.COMPARISONS, "ops", {"ssd": lacking, **SMALL})
    assert main(["bench", "ops", "--rounds", "1", "--output", str(tmp_path)]) == 0
    rows = read(tmp_path)["comparisons"]
    assert all("transformers" in row["not_measured"] for row in rows["ssd"]) and "ratio" in rows["gla"][0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ops", "--rows", "gal"], "there is no row 'gal': choose of gla, short_conv"),
        (["ops", "--rounds", "0"], "rounds is 0; it must be at least 1"),
        (["opps"], "opps"),
    ],
)
def test_wrong_input_is_told_in_one_sentence(small, tmp_path, capsys, words, sentence):
    assert main(["bench", *words, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_results_of_another_machine_are_not_mixed_in(small, tmp_path, capsys):
    assert main(["bench", "ops", "--rows", "gla", "--rounds", "1", "--output", str(tmp_path)]) == 0
    results = read(tmp_path)
    results["machine"]["processor"] = "abacus"
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert main(["bench", "ops", "--rounds", "1", "--output", str(tmp_path)]) == 2
    assert "was measured with another machine" in capsys.readouterr().err
    assert read(tmp_path) == results
