"""A claim is run job by job, resumed, recorded, and held against what was recorded."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssm_trn.claims import Claim, Job, Results, Shape, main
from ssm_trn.claims.rows import deviations, read_rows, tolerance, write_rows
from ssm_trn.evaluation.statistics import mean_of

README = "# A claim\n\n<!-- results: begin -->\n<!-- results: end -->\n\nMore.\n"


@dataclass(frozen=True)
class Doubling:
    """An experiment whose value is twice the seed, times `factor`."""

    seeds: tuple[int, ...] = (0, 1, 2)
    factor: int = 2

    def jobs(self):
        return [Job(f"seed{seed}", seed, f"factor{self.factor}") for seed in self.seeds]

    def run(self, job, folder, rows):
        folder.mkdir(parents=True)
        return [{"model": "a", "value": str(self.factor * job.seed), "cpu_seconds": "60"}]

    def compared(self, rows):
        return list(rows)

    def narrowed(self, rows, seeds, reduced):
        return Doubling(tuple(seeds or self.seeds[:1]), self.factor)


def table(results: Results) -> str:
    return f"mean {results.of(model='a').value('value'):g}"


@pytest.fixture
def claim(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "papers" / "doubling"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(README)
    shapes = [
        Shape("large", lambda results: results.value("value") > 10),
        Shape("later", lambda results: None),
        Shape("small", lambda results: results.value("value") < 10),
    ]
    return Claim(folder, "Doubling", {"cpu": Doubling()}, ("model",), "value", table, shapes=shapes)


def test_recording_writes_results_and_readme(claim):
    assert main(claim, ["--record"]) == 0
    readme = (claim.folder / "README.md").read_text()
    for part in ("mean 2", "* **not shown**: large", "* not yet run: later", "* **shown**: small", "3 jobs, 3 minutes"):
        assert part in readme
    assert readme.startswith("# A claim\n") and readme.endswith("More.\n")
    assert [row["value"] for row in read_rows(claim.folder / "results.csv")] == ["0", "2", "4"]


def test_what_is_done_is_not_done_again(claim, capsys):
    main(claim, ["--record"])
    capsys.readouterr()
    write_rows(claim.folder / "results.csv", read_rows(claim.folder / "results.csv")[:2])
    assert main(claim, ["--record", "--list_jobs"]) == 0
    assert capsys.readouterr().out.split() == ["done", "seed0", "done", "seed1", "to", "do", "seed2"]


def test_rows_of_other_settings_are_made_anew(claim):
    main(claim, ["--record"])
    changed = Claim(claim.folder, "Doubling", {"cpu": Doubling(factor=3)}, ("model",), "value", table)
    assert main(changed, ["--record", "--output", "elsewhere"]) == 0
    assert [row["value"] for row in read_rows(claim.folder / "results.csv")] == ["0", "3", "6"]


def test_another_seed_is_held_against_the_recorded_ones(claim, capsys):
    main(claim, ["--record"])
    capsys.readouterr()
    assert main(claim, ["--seeds", "5"]) == 0  # 10: mean 2, s 2, t(0.975, 2) 4.303, so 2 +- 9.94
    assert "1 of 1 figures are within tolerance" in capsys.readouterr().out
    assert main(claim, ["--seeds", "6", "--output", "other"]) == 0
    assert "0 of 1 figures are within tolerance" in (out := capsys.readouterr().out)
    assert "a: 12, committed 2 ± 9.9" in out
    assert not (claim.folder / "results-seeds.csv").exists()


def test_reduced_results_do_not_touch_the_recorded_ones(claim):
    main(claim, ["--record"])
    before = (claim.folder / "README.md").read_bytes()
    assert main(claim, ["--reduced"]) == 0
    assert (claim.folder / "README.md").read_bytes() == before
    assert Path("runs/papers/doubling/cpu-reduced/report.md").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--record", "--reduced"], "leave out --reduced"),
        (["--processes", "0"], "--processes is 0"),
        (["--only_report"], "has no results yet"),
    ],
)
def test_wrong_options_are_told_in_a_sentence(claim, capsys, words, told):
    assert main(claim, words) == 2
    assert told in capsys.readouterr().err


def test_a_damaged_results_file_is_told(claim, capsys):
    (claim.folder / "results.csv").write_text("a,b\n1\n")
    assert main(claim, ["--record"]) == 2
    assert "is damaged" in capsys.readouterr().err


SCRIPT = """
import sys
from pathlib import Path

from ssm_trn.claims import Claim, Grid, Task, main

size = {"d_model": 16, "d_ff": 16, "layers": ["deltanet"]}
task = Task("parity", {"length": 8, "every_step": True}, steps=3, batch_size=4, test_rows=8)
grid = Grid({"parity": task}, {"deltanet": size}, [1e-3, 1e-2], seeds=(0, 1))
CLAIM = Claim(Path(__file__).parent, "a", {"cpu": grid}, ("model",), "accuracy", lambda results: "table")
if __name__ == "__main__":
    sys.exit(main(CLAIM))
"""


def test_jobs_in_processes_give_the_same_rows(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), "--processes", "2", "--output", str(tmp_path / "two")]
    subprocess.run(words, check=True, timeout=300)
    spec = importlib.util.spec_from_file_location("script", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert main(module.CLAIM, ["--output", str(tmp_path / "one")]) == 0
    one, two = (read_rows(tmp_path / name / "results.csv") for name in ("one", "two"))
    times = {"cpu_seconds": ""}
    assert [row | times for row in one] == [row | times for row in two]
    names = ["parity-deltanet-lr0.001-seed0", "parity-deltanet-lr0.01-seed0", "parity-deltanet-seed1"]
    assert [row["job"] for row in one] == names
    best = min(one[:2], key=lambda row: -float(row["validation"]))
    assert one[2]["learning_rate"] == best["learning_rate"]


def test_tolerance_is_the_prediction_interval():
    values = [1.0, 2.0, 4.0]
    s = (sum((value - 7 / 3) ** 2 for value in values) / 2) ** 0.5
    assert tolerance(mean_of(values), values, 0.0) == pytest.approx(4.302653 * s * (4 / 3) ** 0.5, rel=1e-6)
    assert tolerance(mean_of([1.0, 1.0]), [1.0, 1.0], 0.02) == 0.02
    assert tolerance(mean_of([1.0]), [1.0], 0.02) is None


def test_figures_with_one_committed_seed_are_not_compared():
    row = {"model": "a", "seed": "0", "value": "1"}
    assert deviations(Results([row]), Results([row]), ["model"], "value", 0.02) == []
