"""Runs that survive kills, full disks, damaged files and other settings than their own."""

import os
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest
import yaml

from ssm_trn.cli import main
from ssm_trn.data import TokenDataModule
from ssm_trn.training import LanguageModelModule
from ssm_trn.training.checkpoints import last_checkpoint
from tests.training.runs import error_of, fit, go_on, same_run, saved_step
from tests.training.tiny import metrics
from tests.training.torture import torture, undisturbed_run, write_torture_config


@pytest.fixture
def begun(config, tmp_path, at_step):
    """A run of which step 3 is saved and which was stopped in step 6."""

    def interrupt(module):
        raise KeyboardInterrupt

    at_step(5, interrupt)
    assert fit(config, tmp_path / "run") == 130
    at_step(5, lambda module: None)
    assert saved_step(tmp_path / "run") == 3
    return tmp_path / "run"


def contents(folder: Path):
    """All files but TensorBoard's, which begins an empty one each time."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith("tensorboard")}


# Kills


class Forked:
    """`ssm-trn` in a process that need not import anything any more."""

    def __init__(self, words):
        self._process = get_context("fork").Process(target=lambda: os._exit(main(words)))
        self._process.start()
        self.kill = self._process.kill

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self):
        self._process.join()
        return self._process.exitcode


def test_killed_at_random_instants_a_run_goes_on_bitwise(tmp_path):
    """One in its start, one at its end, two in between; `make torture` kills twenty that begin from nothing."""
    config = write_torture_config(tmp_path)
    undisturbed = undisturbed_run(config, tmp_path / "undisturbed", Forked)
    kills = list(torture(config, undisturbed, tmp_path, kills=4, seed=os.getpid(), start=Forked))
    assert len(kills) == 4 and all(kill.survived for kill in kills), kills


def test_what_the_steps_draw_goes_on_too(config, tmp_path, at_step):
    noisy = tmp_path / "noisy.yaml"
    settings = yaml.safe_load(Path(config).read_text())
    settings["model"]["class_path"] = "tests.training.noise.NoisyModule"
    noisy.write_text(yaml.safe_dump(settings))
    assert fit(noisy, tmp_path / "whole") == 0
    noise = [row["noise"] for row in metrics(tmp_path / "whole") if "noise" in row]
    assert len(set(noise)) == 8

    def interrupt(module):
        raise KeyboardInterrupt

    at_step(5, interrupt)
    assert fit(noisy, tmp_path / "run") == 130
    at_step(5, lambda module: None)
    assert go_on(noisy, tmp_path / "run") == 0
    assert same_run(tmp_path / "run", tmp_path / "whole")


def test_a_validation_that_was_stopped_is_done_again(config, undisturbed, tmp_path, monkeypatch):
    """The checkpoint of a step that is followed by a validation waits for it."""

    def interrupt(module, batch, batch_idx):
        if module.trainer.global_step == 4:
            raise KeyboardInterrupt
        module._scores.append(module._score(batch))

    words = ["--checkpoint.every_n_train_steps", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelModule, "validation_step", interrupt)
        assert fit(config, tmp_path / "run", *words) == 130
    assert saved_step(tmp_path / "run") == 2
    assert go_on(config, tmp_path / "run", *words) == 0
    assert same_run(tmp_path / "run", undisturbed)


def test_what_a_killed_run_was_writing_is_removed(config, undisturbed, begun):
    for name in (".config.yaml.unfinished", "checkpoints/.other.ckpt.unfinished"):
        (begun / name).write_text("half of it")
    with open(begun / "metrics.csv", "a") as file:
        file.write("6,0.0")  # and a row that was cut short
    assert go_on(config, begun) == 0
    assert not [*begun.rglob(".*.unfinished")] and same_run(begun, undisturbed)


# Full disks


def test_a_disk_that_is_full_when_a_checkpoint_is_written(config, undisturbed, begun, at_step, capsys):
    before = contents(begun / "checkpoints")
    at_step(4, lambda module: (begun / "checkpoints" / ".last.ckpt.unfinished").symlink_to("/dev/full"))
    assert go_on(config, begun) == 2
    error = error_of(capsys)
    assert f"{last_checkpoint(begun)}: no space left on device; free some and run the same command again" in error
    assert contents(begun / "checkpoints") == before
    at_step(4, lambda module: None)
    assert go_on(config, begun) == 0
    assert same_run(begun, undisturbed)


def test_a_disk_that_is_full_when_a_row_is_written(config, undisturbed, begun, at_step, capsys):
    def fill(module):
        (begun / "metrics.csv").rename(begun / "rows")
        (begun / "metrics.csv").symlink_to("/dev/full")

    at_step(4, fill)
    assert go_on(config, begun) == 2
    assert f"{begun / 'metrics.csv'}: no space left on device; free some" in error_of(capsys)
    (begun / "rows").rename(begun / "metrics.csv")
    at_step(4, lambda module: None)
    assert go_on(config, begun) == 0
    assert same_run(begun, undisturbed)


# Damaged files


def test_a_damaged_last_checkpoint_names_the_one_before(config, undisturbed, begun, at_step, capsys):
    at_step(7, lambda module: os.kill(os.getpid(), signal.SIGTERM))
    assert go_on(config, begun) == 0  # too late to stop: the last step was running
    last, previous = Path(last_checkpoint(begun)), begun / "checkpoints" / "previous.ckpt"
    os.truncate(_own_copy(last), 2000)
    assert go_on(config, begun) == 2
    assert f"{last} is not a checkpoint of a training, or a damaged one" in (error := error_of(capsys))
    assert f"go on from the one before with --ckpt_path {previous}" in error
    last.unlink()
    before = contents(begun)
    for command in ("fit", "validate"):
        assert main([command, "--config", config, "--run_folder", str(begun), "--ckpt_path", "last"]) == 2
        assert f"{last} is gone: go on from the one before with --ckpt_path {previous}" in error_of(capsys)
    assert contents(begun) == before
    at_step(7, lambda module: None)
    assert fit(config, begun, "--ckpt_path", str(previous)) == 0
    assert same_run(begun, undisturbed)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ids_outside_the_vocabulary_end_a_run_that_keeps_its_checkpoint(config, tmp_path, capsys, num_workers):
    settings = yaml.safe_load(Path(config).read_text())["data"]["init_args"]
    data = shutil.copytree(settings["folder"], tmp_path / "data")
    module = TokenDataModule(str(data), block_length=16, batch_size=2)
    module.setup("fit")
    with open(data / "train.bin", "r+b") as file:
        file.seek(module.blocks_of(5)[1] * 16 * 2)  # two bytes an id
        file.write(b"\xff\xff")
    words = ["--data.init_args.folder", str(data), "--data.init_args.num_workers", str(num_workers)]
    assert fit(config, tmp_path / "run", *words, "--checkpoint.every_n_train_steps", "1") == 2
    assert f"{data / 'train.bin'} holds ids that its tokenizer does not have: run `ssm-trn prepare`" in error_of(capsys)
    assert saved_step(tmp_path / "run") >= 1


def test_token_files_that_were_cut_short_or_are_foreign(config, tmp_path, capsys):
    settings = yaml.safe_load(Path(config).read_text())["data"]["init_args"]
    data = shutil.copytree(settings["folder"], tmp_path / "data")
    words = ["--data.init_args.folder", str(data)]
    content = (data / "train.bin").read_bytes()
    (data / "train.bin").write_bytes(content[:-10])
    assert fit(config, tmp_path / "run", *words) == 2
    assert f"train.bin has {len(content) - 10} bytes where it should have {len(content)}" in error_of(capsys)
    (data / "train.bin").write_bytes(b"some text of another kind" * len(content))
    assert fit(config, tmp_path / "run", *words) == 2
    assert f"where it should have {len(content)}: copy the folder again" in error_of(capsys)
    assert not (tmp_path / "run").exists()


# Settings that contradict the checkpoint


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("model.init_args.learning_rate", "0.5", "0.01, and would go on with 0.5"),
        ("model.init_args.warmup_steps", "3", "2, and would go on with 3"),
        ("model.init_args.final_learning_rate_ratio", "0.2", "0.1, and would go on with 0.2"),
        ("model.init_args.weight_decay", "0.2", "0.1, and would go on with 0.2"),
        ("model.init_args.betas", "[0.8, 0.9]", "[0.9, 0.95], and would go on with [0.8, 0.9]"),
        ("trainer.max_steps", "9", "8, and would go on with 9"),
        ("trainer.accumulate_grad_batches", "2", "1, and would go on with 2"),
        ("trainer.gradient_clip_val", "2.0", "1.0, and would go on with 2.0"),
        ("trainer.gradient_clip_algorithm", "value", "norm, and would go on with value"),
        ("trainer.precision", "bf16-mixed", "32-true, and would go on with bf16-mixed"),
    ],
)
def test_a_run_goes_on_with_its_own_settings_only(config, undisturbed, capsys, name, value, told):
    before = contents(undisturbed)
    assert go_on(config, undisturbed, f"--{name}", value) == 2
    error = error_of(capsys)
    assert f"the run was begun with {name} {told}: leave it as it was, or begin a new run" in error
    assert f"another --run_folder and --ckpt_path {last_checkpoint(undisturbed)}" in error
    assert contents(undisturbed) == before


def test_another_batch_is_refused_and_config_stays(config, undisturbed, capsys):
    before = contents(undisturbed)
    for name, value in (("batch_size", "4"), ("block_length", "8"), ("seed", "1")):
        assert go_on(config, undisturbed, f"--data.init_args.{name}", value) == 2
        assert f"trained with another {name}" in error_of(capsys)
    assert contents(undisturbed) == before


def test_a_run_does_not_go_on_in_the_folder_of_another(config, undisturbed, begun, capsys):
    before = contents(begun)
    assert fit(config, begun, "--ckpt_path", last_checkpoint(undisturbed)) == 2
    assert f"{begun} holds a run already" in error_of(capsys)
    assert contents(begun) == before


def _own_copy(path: Path) -> Path:
    """A file that shares nothing with the one before it, as damage does not."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return path
