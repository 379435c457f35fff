import csv

import pytest

from ssm_trn.training.metrics_file import MetricsFile


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_new_metric_adds_a_column_to_all_rows(tmp_path):
    log = MetricsFile(str(tmp_path / "run"))
    log.log_metrics({"loss": 2.0}, step=1)
    log.log_metrics({"loss": 1.5, "speed": 7.0}, step=2)
    log.log_metrics({"speed": 8.0}, step=3)
    assert rows(tmp_path / "run") == [
        {"step": "1", "loss": "2.0", "speed": ""},
        {"step": "2", "loss": "1.5", "speed": "7.0"},
        {"step": "3", "loss": "", "speed": "8.0"},
    ]
    assert log.latest == {"loss": 1.5, "speed": 8.0}


def test_a_resumed_run_keeps_the_rows_of_the_steps_that_its_checkpoint_knows(tmp_path):
    log = MetricsFile(str(tmp_path))
    for step in range(1, 6):
        log.log_metrics({"loss": 1.0 / step}, step=step)
    resumed = MetricsFile(str(tmp_path))
    resumed.restart_after(3)
    resumed.log_metrics({"loss": 9.0, "new": 1.0}, step=4)
    assert [(row["step"], row["loss"], row["new"]) for row in rows(tmp_path)] == [
        ("1", "1.0", ""),
        ("2", "0.5", ""),
        ("3", str(1 / 3), ""),
        ("4", "9.0", "1.0"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv"]


def test_a_run_from_the_beginning_begins_a_new_file(tmp_path):
    log = MetricsFile(str(tmp_path))
    log.restart_after(0)
    log.log_metrics({"loss": 1.0}, step=1)
    again = MetricsFile(str(tmp_path))
    again.restart_after(0)
    again.log_metrics({"other": 2.0}, step=1)
    assert rows(tmp_path) == [{"step": "1", "other": "2.0"}]


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="metrics.csv is not the metrics of a run: move it away"):
        MetricsFile(str(tmp_path)).restart_after(3)
    assert (tmp_path / "metrics.csv").read_text() == "a,b\n1,2\n"
