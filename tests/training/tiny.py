"""Data and a configuration so small that a training takes a second."""

import csv
import random
from pathlib import Path

import yaml

from ssm_trn.data.prepare import prepare

VOCAB_SIZE = 300


def prepare_data(folder: Path, documents: int = 12, lines: int = 30) -> str:
    """A prepared folder with documents of random words."""
    words = random.Random(0)
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for document in range(documents):
        rows = (
            " ".join("".join(words.choices("abdeilnorst", k=words.randint(2, 6))) for _ in range(8))
            for _ in range(lines)
        )
        (texts / f"{document:02}.txt").write_text("\n".join(rows))
    prepare(str(folder / "data"), source=str(texts), vocab_size=VOCAB_SIZE, holdout_every=6)
    return str(folder / "data")


def write_config(path: Path, data: str, layers=("mamba2", {"mixer": "attention", "window": 8})) -> str:
    """A configuration of `ssm-trn fit` without a run folder: 8 steps, each logged."""
    config = {
        "model": {
            "class_path": "ssm_trn.training.LanguageModelModule",
            "init_args": {
                "config": {"vocab_size": VOCAB_SIZE, "d_model": 32, "layers": list(layers)},
                "learning_rate": 0.01,
                "warmup_steps": 2,
            },
        },
        "data": {
            "class_path": "ssm_trn.data.TokenDataModule",
            "init_args": {"folder": data, "block_length": 16, "batch_size": 2},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 8,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": 1,
            "val_check_interval": 4,
            "check_val_every_n_epoch": None,
            "limit_val_batches": 2,
            "enable_progress_bar": False,
        },
        "checkpoint": {"every_n_train_steps": 3},
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def metrics(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without empty values and without what a clock measured."""
    with open(run / "metrics.csv", newline="") as file:
        return [
            {name: value for name, value in row.items() if value and name != "tokens_per_second"}
            for row in csv.DictReader(file)
        ]
