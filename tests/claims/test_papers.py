"""Each folder of papers/: its README tells what its results.csv says, which is of run.py as it stands; it runs."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from ssm_trn.claims import Claim, Grid, Results
from ssm_trn.claims.command import current, in_order
from ssm_trn.claims.rows import read_rows
from ssm_trn.results import into_markers

PAPERS = Path(__file__).parents[2] / "papers"
NAMES = sorted(path.parent.name for path in PAPERS.glob("*/run.py"))


def claim_of(name: str) -> Claim:
    spec = importlib.util.spec_from_file_location(f"run_{name}", PAPERS / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CLAIM


@pytest.mark.parametrize("name", NAMES)
def test_readme_and_figure_are_of_the_results(name, tmp_path):
    claim = claim_of(name)
    experiment = claim.experiments["cpu"]
    rows = read_rows(claim.folder / "results.csv")
    readme = (claim.folder / "README.md").read_text()
    assert rows, "no results are committed"
    assert into_markers(readme, claim.report(Results(experiment.compared(rows)), rows)) == readme
    claim.write(rows, "cpu", tmp_path)
    assert (tmp_path / "results.csv").read_bytes() == (claim.folder / "results.csv").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_results_are_of_the_settings_in_run_py(name):
    claim = claim_of(name)
    for scale, experiment in claim.experiments.items():
        rows = read_rows(claim.folder / claim.results_file(scale))
        kept, _ = current(rows, experiment)
        assert in_order(kept, experiment) == rows


GRIDS = [name for name in NAMES if isinstance(claim_of(name).experiments["cpu"], Grid)]


@pytest.mark.parametrize("name", GRIDS)
def test_each_task_and_each_model_of_a_grid_runs(name, tmp_path):
    grid = claim_of(name).experiments["cpu"]
    tasks = {
        of: replace(task, steps=2, batch_size=4, test_rows=4, tests=task.tests[:2]) for of, task in grid.tasks.items()
    }
    models, names = list(grid.models), list(tasks)
    for place in range(max(len(models), len(tasks))):
        task, model = names[place % len(names)], models[place % len(models)]
        cell = replace(
            grid, tasks={task: tasks[task]}, models={model: grid.models[model]}, learning_rates=[1e-3], seeds=[0]
        )
        (job,) = cell.jobs()
        rows = cell.run(job, tmp_path / job.name, [])
        assert len(rows) == len(tasks[task].tests) and rows[0]["steps"] == "2"
