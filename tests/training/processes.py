"""Trainings of several processes, and what it is to be the same run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.training.tiny import metrics, prepare_data, write_config

ROOT = Path(__file__).parents[2]
MEASURED = ("train/loss", "gradient_norm", "validation/loss", "validation/bits_per_byte")


def write_packed_config(folder: Path, **options) -> str:
    """Batches of 4 blocks of short documents, so that each process scores another number of tokens in each batch."""
    path = Path(write_config(folder / "config.yaml", prepare_data(folder, documents=150, lines=1), **options))
    config = yaml.safe_load(path.read_text())
    config["model"]["init_args"]["learning_rate"] = 1e-3
    config["data"]["init_args"]["batch_size"] = 4
    path.write_text(yaml.safe_dump(config))
    return str(path)


def torchrun(processes: int, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """`torchrun -m ssm_trn WORDS`, one thread for each process."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(processes),
            "-m",
            "ssm_trn",
            *words,
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


def assert_same_run(run: Path, other: Path, steps: int = 8) -> None:
    """The same rows in metrics.csv, to 1e-6 nats; of the other run up to a step."""
    ours, others = metrics(run), [row for row in metrics(other) if int(row["step"]) <= steps]
    assert [row.keys() for row in ours] == [row.keys() for row in others]
    for name in MEASURED:
        values = [[float(row[name]) for row in rows if name in row] for rows in (ours, others)]
        assert values[0] and values[0] == pytest.approx(values[1], abs=1e-6), name


def assert_same_weights(run: Path, other: Path) -> None:
    """The same exported model, to 1e-6."""
    ours, others = (load_file(folder / "model.safetensors") for folder in (run, other))
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, others[name], rtol=0, atol=1e-6)
