"""Training on synthetic tasks: parts of ranks, resumption, the accuracies that are logged."""

import csv
from pathlib import Path

import pytest
import torch
import yaml

from ssm_trn import LanguageModel
from ssm_trn.cli import main
from ssm_trn.data.datamodule import IGNORED
from ssm_trn.data.synthetic import SyntheticDataModule, make
from ssm_trn.data.synthetic.datamodule import HeldOutRows, NewRows, SameRows
from ssm_trn.data.synthetic.report import report
from ssm_trn.training.accuracy import accuracies, accuracy_counts
from tests.training.tiny import metrics

ROOT = Path(__file__).parents[3]
EXPERIMENTS = sorted(ROOT.glob("experiments/synthetic_*.yaml"))
BATCH = 12


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def joined(parts):
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("train_rows", [None, 20])
def test_what_ranks_get_together_is_the_batch_of_one(train_rows):
    data = SyntheticDataModule("parity", {"length": 30}, batch_size=BATCH, train_rows=train_rows)
    whole = data.training_batches(0, 1)
    assert isinstance(whole, NewRows if train_rows is None else SameRows)
    for world in (2, 3):
        parts = [data.training_batches(rank, world) for rank in range(world)]
        assert all(same(joined([part[step] for part in parts]), whole[step]) for step in (0, 1, 5))
    assert not torch.equal(whole[0]["tokens"], whole[1]["tokens"])


def test_the_same_rows_come_once_an_epoch_in_new_orders():
    data = SyntheticDataModule("parity", {"length": 30}, batch_size=BATCH, train_rows=20)
    batches = data.training_batches(0, 1)
    rows = [row.numpy().tobytes() for step in range(5) for row in batches[step]["tokens"]]  # 60: three epochs
    epochs = [rows[start : start + 20] for start in (0, 20, 40)]
    assert len({*rows}) == 20 and all({*epoch} == {*rows} for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_held_out_rows_do_not_depend_on_the_seed_and_tell_their_setting():
    tasks = [make("parity", length=8), make("parity", length=16)]
    batches = HeldOutRows(tasks, "test", 3, BATCH, rows=torch.arange(BATCH).numpy())
    assert len(batches) == 6
    for index in range(6):
        batch = batches[index]
        part = batch.pop("part")
        assert part.shape == (BATCH, 2) and part.sum(1).tolist() == [1] * BATCH and part[:, index // 3].all()
        assert same(batch, tasks[index // 3].batch("test", index % 3, BATCH))


def test_settings_have_names_and_twins_are_refused():
    options = {"task": "mqar", "options": {"length": 32}, "validation": [{}, {"length": 64, "pairs": 8}]}
    data = SyntheticDataModule(**options)
    assert data.parts("validation") == data.parts("test") == ["length_32", "length_64_pairs_8"]
    assert SyntheticDataModule(**options, test=[{"pairs": 2}]).parts("test") == ["pairs_2"]
    for wrong, message in (
        ({"validation": [{}, {"length": 32}]}, "length_32 is there twice"),
        ({"validation": [{"lenght": 64}]}, "no option 'lenght'"),
        ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        ({"train_rows": -1}, "train_rows is -1"),
        ({"task": "mqra"}, "did you mean mqar"),
    ):
        with pytest.raises(ValueError, match=message):
            SyntheticDataModule(**(options | wrong))


def test_accuracy_counts_scored_steps_and_rows_of_each_part():
    targets = torch.tensor([[1, IGNORED, 2], [0, 1, IGNORED], [2, 2, 2], [IGNORED] * 3])
    said = torch.tensor([[1, 0, 2], [0, 0, 0], [2, 1, 0], [1, 1, 1]])
    part = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]).bool()
    logits = torch.nn.functional.one_hot(said, 3).bfloat16()
    counts = accuracy_counts(logits, {"targets": targets, "part": part})
    assert counts.tolist() == [3, 4, 1, 2, 1, 3, 0, 1]
    assert dict(accuracies(counts.tolist(), ["short", "long"])) == pytest.approx(
        {
            "accuracy": (3 / 4 + 1 / 3) / 2,
            "accuracy/short": 3 / 4,
            "accuracy/long": 1 / 3,
            "sequence_accuracy": 1 / 4,
            "sequence_accuracy/short": 1 / 2,
            "sequence_accuracy/long": 0,
        }
    )
    assert list(dict(accuracies([1, 2, 0, 1], ["only"]))) == ["accuracy", "sequence_accuracy"]
    assert len(accuracy_counts(logits, {"targets": targets})) == 0


# Through the command line


def write_config(path, **data) -> str:
    config = {
        "model": {
            "class_path": "ssm_trn.training.LanguageModelModule",
            "init_args": {
                "config": {"vocab_size": 20, "d_model": 16, "layers": ["gla"], "tie_embeddings": False},
                "learning_rate": 0.02,
                "warmup_steps": 2,
                "final_learning_rate_ratio": 1.0,
            },
        },
        "data": {
            "class_path": "ssm_trn.data.synthetic.SyntheticDataModule",
            "init_args": {
                "task": "parity",
                "options": {"length": 8, "every_step": True},
                "validation": [{}, {"length": 16}],
                "batch_size": 4,
                "validation_batches": 2,
            }
            | data,
        },
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 8,
            "log_every_n_steps": 1,
            "val_check_interval": 4,
            "check_val_every_n_epoch": None,
            "enable_progress_bar": False,
            "logger": False,
        },
        "checkpoint": {"every_n_train_steps": 3},
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_a_run_logs_accuracies_and_a_resumed_one_is_the_same(tmp_path, capsys):
    config = write_config(tmp_path / "config.yaml")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["fit", "--config", config, "--run_folder", str(whole)]) == 0
    rows = metrics(whole)
    names = {f"validation/{kind}{part}" for kind in ("accuracy", "sequence_accuracy") for part in ("", "/length_8")}
    assert names <= {name for row in rows for name in row}
    assert not any("bits_per_byte" in name for row in rows for name in row)
    assert LanguageModel.from_pretrained(whole).config.vocab_size == 20
    assert not (whole / "tokenizer.model").exists()
    again = ["fit", "--config", config, "--run_folder", str(cut), "--ckpt_path", "last"]
    assert main([*again, "--trainer.max_steps", "5"]) == 0
    assert main(again) == 0
    late = [[row for row in metrics(run) if int(float(row["step"])) > 5] for run in (whole, cut)]
    assert late[0] == late[1] and len(late[0]) == 4

    capsys.readouterr()
    assert main([*again, "--data.init_args.options", "{length: 9}"]) == 2
    assert "trained with another options" in capsys.readouterr().err
    assert main(["test", "--config", config, "--run_folder", str(whole)]) == 0
    assert "test/accuracy/length_16" in capsys.readouterr().out


def test_a_vocabulary_that_is_too_small_is_told_before_the_training(tmp_path, capsys):
    config = write_config(tmp_path / "config.yaml", validation=[{}], task="copying", options={"length": 4})
    assert main(["fit", "--config", config, "--run_folder", str(tmp_path / "run")]) == 2
    assert "make model.init_args.config.vocab_size at least 30" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment(experiment, tmp_path):
    settings = yaml.safe_load(experiment.open())
    assert settings["run_folder"] == f"runs/{experiment.stem}"
    assert experiment.stem == f"synthetic_{settings['data']['init_args']['task']}"
    words = [
        "--config",
        str(experiment),
        "--run_folder",
        str(tmp_path / "run"),
        "--trainer.enable_progress_bar",
        "false",
    ]
    words += [
        "--model.init_args.config.d_model",
        "16",
        "--model.init_args.config.d_ff",
        "16",
        "--trainer.logger",
        "false",
    ]
    words += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    words += ["--data.init_args.batch_size", "2", "--data.init_args.validation_batches", "1"]
    assert main(["fit", *words]) == 0
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        assert any(row.get("validation/accuracy") for row in csv.DictReader(file))


def test_the_page_is_what_its_command_writes():
    assert (ROOT / "docs" / "synthetic" / "README.md").read_text() == report()


def test_each_task_has_its_experiment():
    from ssm_trn.data.synthetic import TASKS

    assert {path.stem.removeprefix("synthetic_") for path in EXPERIMENTS} == set(TASKS)
