"""What tests do with runs: begin them, go on with them, look at what they left."""

import torch

from ssm_trn.cli import main
from ssm_trn.training.checkpoints import last_checkpoint
from tests.training.tiny import metrics


def fit(config, run, *words):
    return main(["fit", "--config", str(config), "--run_folder", str(run), *words])


def go_on(config, run, *words):
    return fit(config, run, "--ckpt_path", "last", *words)


def saved_step(run):
    return torch.load(last_checkpoint(run), weights_only=True)["global_step"]


def error_of(capsys):
    error = capsys.readouterr().err
    assert error.startswith("ssm-trn: error: ") and error.count("\n") == 1
    return error


def same_run(run, other):
    return metrics(run) == metrics(other) and all(
        (run / name).read_bytes() == (other / name).read_bytes() for name in ("model.safetensors", "tokenizer.model")
    )
