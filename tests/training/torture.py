"""Kills trainings at random instants, lets each go on, and compares it with one that nothing disturbed.

    python -m tests.training.torture --kills 20

prints a line for each kill and ends with status 1 if a single number differs. Each training that is killed is a process
`ssm-trn fit` of its own, killed as by `kill -9`: in its start, in a step, while it writes a row, a checkpoint or the
exported model.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from ssm_trn.training.checkpoints import last_checkpoint
from tests.training.tiny import metrics, prepare_data, write_config

ROOT = Path(__file__).parents[2]
STEPS = 60
_SMALL = {"max_steps": STEPS, "val_check_interval": 10}
Start = Callable[[list[str]], Any]  # of `ssm-trn` in a process, which has the methods of `subprocess.Popen`


@dataclass(frozen=True)
class Kill:
    """One killed run: when, what was there at its death, and whether the run that went on gave the same numbers."""

    instant: str
    reached: int  # step of the last row in metrics.csv
    checkpoint: int  # step of last.ckpt, 0 if there was none
    writing: str  # what was being written, if anything was
    same_rows: bool
    same_weights: bool

    @property
    def survived(self) -> bool:
        return self.same_rows and self.same_weights


@dataclass(frozen=True)
class Undisturbed:
    folder: Path
    start: float  # seconds until the first row
    rows: int
    end: float  # seconds from the last row to the end of the process


def write_torture_config(folder: Path) -> str:
    """A configuration of 60 steps with a checkpoint every 5 of them and a validation every 10."""
    path = folder / "config.yaml"
    config = yaml.safe_load(Path(write_config(path, prepare_data(folder))).read_text())
    config["trainer"] |= _SMALL
    config["checkpoint"] = {"every_n_train_steps": 5}
    path.write_text(yaml.safe_dump(config))
    return str(path)


def words_of(config: str, run: Path) -> list[str]:
    return ["fit", "--config", config, "--run_folder", str(run), "--ckpt_path", "last"]


def start(words: list[str]) -> subprocess.Popen:
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "ssm_trn", *words], env=os.environ | threads, **quiet)


def undisturbed_run(config: str, run: Path, start: Start = start) -> Undisturbed:
    """Trains in a process of its own, and takes its times."""
    began = time.monotonic()
    process = start(words_of(config, run))
    first = last = began
    rows = 0
    while process.poll() is None:
        if (now := _rows(run)) > rows:
            rows, last = now, time.monotonic()
            first = last if first == began else first
        time.sleep(0.001)
    if process.returncode:
        raise RuntimeError(f"the training ended with status {process.returncode}")
    return Undisturbed(run, first - began, rows, time.monotonic() - last)


def torture(
    config: str,
    undisturbed: Undisturbed,
    folder: Path,
    kills: int,
    seed: int,
    start: Start = start,
) -> Iterator[Kill]:
    """Kills `kills` runs, a tenth of them in their start and a tenth at their end, and lets each go on."""
    draw = random.Random(seed)
    for number in range(kills):
        run = folder / f"run{number}"
        kind = ("start", "end")[number % 10] if number % 10 < 2 else "middle"
        while not (instant := _kill(start, words_of(config, run), run, undisturbed, kind, draw)):
            run = run.with_name(f"{run.name}_")  # it had ended before
        found = {
            "reached": int(metrics(run)[-1]["step"]) if _rows(run) else 0,
            "checkpoint": _step(last_checkpoint(run)),
            "writing": ", ".join(path.name for path in sorted(run.rglob(".*.unfinished"))),
        }
        whole = start(words_of(config, run)).wait() == 0
        yield Kill(
            instant,
            **found,
            same_rows=whole and metrics(run) == metrics(undisturbed.folder),
            same_weights=whole and _weights(run) == _weights(undisturbed.folder) and not [*run.rglob(".*.unfinished")],
        )


def _kill(start: Start, words: list[str], run: Path, undisturbed: Undisturbed, kind: str, draw: random.Random) -> str:
    """Kills a run at an instant that is drawn and returned in words; empty if the run had ended before."""
    row = {"start": 0, "end": undisturbed.rows}.get(kind, draw.randrange(1, undisturbed.rows))
    wait = draw.uniform(0, {"start": undisturbed.start, "end": undisturbed.end}.get(kind, 0.04))
    process = start(words)
    while _rows(run) < row and process.poll() is None:
        time.sleep(0.0005)
    time.sleep(wait)
    process.kill()
    if process.wait() == 0:
        return ""
    return f"{wait:.3f} s after " + (f"row {row} of {undisturbed.rows}" if row else "the start")


def _rows(run: Path) -> int:
    """Rows of metrics.csv that are there."""
    try:
        return max((run / "metrics.csv").read_text().count("\n") - 1, 0)
    except FileNotFoundError:
        return 0


def _step(checkpoint: str) -> int:
    return torch.load(checkpoint, weights_only=True)["global_step"] if os.path.exists(checkpoint) else 0


def _weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    survived = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = write_torture_config(folder)
        undisturbed = undisturbed_run(config, folder / "undisturbed")
        print(f"{STEPS} steps in {undisturbed.rows} rows, killed and gone on with; seed {options.seed}\n")
        print("| kill | instant | step reached | checkpoint of | being written | same rows | same weights |")
        print("| ---: | --- | ---: | ---: | --- | --- | --- |")
        kills = torture(config, undisturbed, folder, options.kills, options.seed)
        for number, kill in enumerate(kills, 1):
            same = " | ".join("yes" if equal else "NO" for equal in (kill.same_rows, kill.same_weights))
            found = f"{kill.instant} | {kill.reached} | {kill.checkpoint} | {kill.writing}"
            print(f"| {number} | {found} | {same} |", flush=True)
            survived += kill.survived
    print(f"\n{survived} of {options.kills} went on bitwise as if nothing had happened")
    return int(survived < options.kills)


if __name__ == "__main__":
    sys.exit(main())
