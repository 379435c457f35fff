import math

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.nn.functional import log_softmax
from torch.utils.data import DataLoader

from ssm_trn import ModelConfig
from ssm_trn.data import TokenDataModule, TokenFile
from ssm_trn.data.tokenizer import BOS_ID, EOS_ID
from ssm_trn.training import LanguageModelModule
from tests.training.tiny import VOCAB_SIZE, prepare_data

CONFIG = ModelConfig(vocab_size=VOCAB_SIZE, d_model=16, layers=["attention"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_data(tmp_path_factory.mktemp("data"))


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **options)


def module(**options):
    torch.manual_seed(0)
    return LanguageModelModule(CONFIG, **options)


def loader():
    """One batch of tokens that are to be repeated."""
    tokens = torch.randint(VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "targets": tokens, "reset": torch.zeros_like(tokens, dtype=torch.bool)}
    return DataLoader([batch], batch_size=None)


def gradient_norm(network):
    return torch.stack([parameter.grad.double().norm() for parameter in network.parameters()]).norm().item()


def test_bits_per_byte_are_those_of_the_text_alone(data):
    """Against a sum in float64 over single documents, block by block: no BOS, no EOS, no padding."""
    network, block_length = module(), 16
    with torch.no_grad():  # far from uniform, so that a wrong token would show
        network.model.embedding.weight.mul_(50)
    results = trainer().validate(
        network, datamodule=TokenDataModule(data, block_length=block_length, batch_size=3), verbose=False
    )[0]

    held_out = TokenFile.open(data, "validation")
    ids = np.asarray(held_out.tokens, dtype=np.int64)
    nats = tokens = text_nats = 0.0
    reference = network.model.double()
    for start in range(0, len(ids) - 1, block_length):
        block = torch.from_numpy(ids[start : start + block_length + 1])
        with torch.no_grad():
            logits, _ = reference(block[None, :-1], reset=(block == BOS_ID)[None, :-1])
        for scores, target in zip(log_softmax(logits[0], -1), block[1:].tolist(), strict=True):
            if target != BOS_ID:
                nats, tokens = nats - scores[target].item(), tokens + 1
                text_nats -= 0.0 if target == EOS_ID else scores[target].item()
    assert results["validation/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert results["validation/bits_per_byte"] == pytest.approx(text_nats / math.log(2) / held_out.text_bytes, rel=1e-5)


def test_data_without_a_tokenizer_has_a_loss_only():
    class Synthetic(LightningDataModule):
        def val_dataloader(self):
            return loader()

    assert set(trainer().validate(module(), datamodule=Synthetic(), verbose=False)[0]) == {"validation/loss"}


@pytest.mark.parametrize("limit", [None, 1e-3, 1e3])
def test_gradients_are_clipped_to_the_trainers_value(limit):
    class Recorded(LanguageModelModule):
        def on_before_optimizer_step(self, optimizer):
            self.norm_before = gradient_norm(self)

    torch.manual_seed(0)
    network = Recorded(CONFIG)
    running = trainer(max_steps=1, limit_val_batches=0, log_every_n_steps=1, gradient_clip_val=limit)
    running.fit(network, loader())
    assert network.norm_before > 1e-2
    assert running.callback_metrics["gradient_norm"].item() == pytest.approx(network.norm_before, rel=1e-5)
    assert gradient_norm(network) == pytest.approx(min(network.norm_before, limit or math.inf), rel=1e-3)


def test_gradients_are_clipped_by_value():
    network = module()
    trainer(max_steps=1, limit_val_batches=0, gradient_clip_val=1e-4, gradient_clip_algorithm="value").fit(
        network, loader()
    )
    assert max(parameter.grad.abs().max().item() for parameter in network.parameters()) == pytest.approx(1e-4)


def test_a_training_without_an_end_is_refused():
    class Endless(LightningDataModule):
        def train_dataloader(self):
            return loader()

    with pytest.raises(ValueError, match=r"no end.*max_steps"):
        trainer(max_epochs=-1, limit_val_batches=0).fit(module(), datamodule=Endless())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"final_learning_rate_ratio": 1.5}, "final_learning_rate_ratio is 1.5; it must be between 0 and 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"warmup_steps": -1}, "warmup_steps -1"),
    ],
)
def test_impossible_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        module(**options)
