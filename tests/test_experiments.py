"""Every YAML under configs/ and experiments/ trains two steps, with a small vocabulary and short blocks."""

import json
from pathlib import Path

import pytest
import yaml

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.cli import main
from ssm_trn.files import read_piece
from tests.training.tiny import VOCAB_SIZE, prepare_data

ROOT = Path(__file__).parents[1]
EXPERIMENTS = [
    path
    for path in sorted(ROOT.glob("experiments/*.yaml"))
    if "run_folder" in yaml.safe_load(path.open())
    and not path.stem.startswith("synthetic_")  # these have their own test
]
MODELS, DATA, TRAINERS = (sorted(ROOT.glob(f"configs/{kind}/*.yaml")) for kind in ("model", "data", "trainer"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_data(tmp_path_factory.mktemp("data"))


def train_two_steps(data, run, *words):
    tiny = ["--model.init_args.config.vocab_size", str(VOCAB_SIZE)]
    tiny += ["--model.init_args.config.d_model", "64", "--model.init_args.config.d_ff", "32"]
    tiny += ["--data.init_args.folder", data, "--data.init_args.block_length", "16", "--data.init_args.batch_size", "2"]
    tiny += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1"]
    tiny += ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    tiny += ["--trainer.strategy", "auto", "--trainer.accumulate_grad_batches", "1"]
    assert main(["fit", *words, "--run_folder", str(run), *tiny]) == 0
    return LanguageModel.from_pretrained(run)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment(experiment, data, tmp_path):
    config = yaml.safe_load(experiment.open())["model"]["init_args"]["config"]
    layers = read_piece(experiment.parent, config, experiment.name)["layers"][:4]  # test_plan.py takes all
    words = ["--config", str(experiment), "--model.init_args.config.layers", json.dumps(layers)]
    model = train_two_steps(data, tmp_path / "run", *words)
    assert yaml.safe_load(experiment.open())["run_folder"] == f"runs/{experiment.stem}"
    assert model.config.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("piece", MODELS, ids=lambda path: path.stem)
def test_model(piece):
    config = ModelConfig.from_dict(yaml.safe_load(piece.open()))
    size = {"2m": 2.1e6, "130m": 130e6, "340m": 340e6}[piece.stem.rpartition("-")[2]]
    assert config.parameter_count() == pytest.approx(size, rel=0.01), "the models of this size are to be comparable"
    assert any(str(piece.name) in experiment.read_text() for experiment in EXPERIMENTS), "no experiment uses it"


@pytest.mark.parametrize("piece", DATA, ids=lambda path: path.stem)
def test_data(piece, data, tmp_path):
    train_two_steps(data, tmp_path / "run", "--config", str(EXPERIMENTS[0]), "--data", str(piece))


@pytest.mark.parametrize("piece", TRAINERS, ids=lambda path: path.stem)
def test_trainer(piece, data, tmp_path):
    train_two_steps(data, tmp_path / "run", "--config", str(EXPERIMENTS[0]), "--trainer", str(piece))
