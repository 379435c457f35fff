import pickle
from importlib import import_module
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from ssm_trn.data import TokenDataModule
from ssm_trn.data.datamodule import HeldOutBatches, Loader, StepwiseDataModule, TrainingBatches, epoch_order
from ssm_trn.data.token_file import TokenFile
from ssm_trn.data.tokenizer import BOS_ID, PAD_ID

LENGTH, BATCH = 64, 6
CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "data").glob("*.yaml"))


@pytest.fixture(scope="module")
def train(prepared) -> TokenFile:
    return TokenFile.open(prepared, "train")


@pytest.fixture(scope="module")
def validation(prepared) -> TokenFile:
    return TokenFile.open(prepared, "validation")


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def check_form(batch, rows):
    assert {name: (value.dtype, value.shape) for name, value in batch.items()} == {
        "tokens": (torch.int64, (rows, LENGTH)),
        "targets": (torch.int64, (rows, LENGTH)),
        "reset": (torch.bool, (rows, LENGTH)),
    }
    assert torch.equal(batch["reset"], batch["tokens"] == BOS_ID)
    assert not (batch["targets"] == BOS_ID).any()


# The row of training batches


def test_an_epoch_has_each_block_once_and_each_block_its_targets(train):
    batches = TrainingBatches(train, LENGTH, BATCH, seed=0)
    ids = torch.from_numpy(train.tokens.astype(np.int64))
    assert batches.blocks == (len(ids) - 1) // LENGTH
    rows = []
    for step in range(-(-3 * batches.blocks // BATCH)):
        batch = batches[step]
        check_form(batch, BATCH)
        rows += [(batch["tokens"][row], batch["targets"][row]) for row in range(BATCH)]
    starts = {tuple(ids[i * LENGTH : (i + 1) * LENGTH].tolist()): i for i in range(batches.blocks)}
    assert len(starts) == batches.blocks
    order = [starts[tuple(tokens.tolist())] for tokens, _ in rows]
    for epoch in range(3):
        in_epoch = order[epoch * batches.blocks : (epoch + 1) * batches.blocks]
        assert sorted(in_epoch) == list(range(batches.blocks))
        assert in_epoch != sorted(in_epoch)
    assert order[: batches.blocks] != order[batches.blocks : 2 * batches.blocks]
    for block, (_, targets) in zip(order, rows, strict=True):
        following = ids[block * LENGTH + 1 : (block + 1) * LENGTH + 1]
        assert torch.equal(targets, torch.where(following == BOS_ID, -100, following))


def test_a_batch_depends_on_seed_and_step_alone(train):
    batches = TrainingBatches(train, LENGTH, BATCH, seed=3)
    backwards = {step: batches[step] for step in reversed(range(20))}
    again = TrainingBatches(train, LENGTH, BATCH, seed=3)
    assert all(same(again[step], backwards[step]) for step in range(20))
    other = TrainingBatches(train, LENGTH, BATCH, seed=4)
    assert not any(same(other[step], backwards[step]) for step in range(20))


def test_the_order_is_the_same_on_every_machine():
    """A new release of numpy must not change what a seed means."""
    assert epoch_order(0, 1, 10).tolist() == [9, 4, 0, 8, 1, 5, 3, 2, 6, 7]


def test_batch_larger_than_the_corpus(train):
    blocks = TrainingBatches(train, LENGTH, 1, seed=0).blocks
    size = 2 * blocks + 1
    whole = TrainingBatches(train, LENGTH, size, seed=0)[1]["tokens"]
    single = TrainingBatches(train, LENGTH, 1, seed=0)
    assert torch.equal(whole, torch.cat([single[place]["tokens"] for place in range(size, 2 * size)]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_global_batch(train, validation, world_size):
    def joined(make, step):
        parts = [make(rank, world_size)[step] for rank in range(world_size)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    for step in (0, 7):
        whole = TrainingBatches(train, LENGTH, BATCH, 1)[step]
        assert same(joined(lambda *place: TrainingBatches(train, LENGTH, BATCH, 1, *place), step), whole)
    whole = HeldOutBatches(validation, LENGTH, BATCH)[0]
    assert same(joined(lambda *place: HeldOutBatches(validation, LENGTH, BATCH, *place), 0), whole)


def test_batch_that_does_not_divide(train):
    with pytest.raises(ValueError, match="batch_size 6 is not divisible by the 4 devices"):
        TrainingBatches(train, LENGTH, BATCH, 0, rank=0, world_size=4)


def test_corpus_shorter_than_a_block(train):
    tokens = len(train)
    assert TrainingBatches(train, tokens - 1, 1, seed=0).blocks == 1
    with pytest.raises(ValueError, match=f"has {tokens} tokens, fewer than one block of {tokens} \\+ 1"):
        TrainingBatches(train, tokens, 1, seed=0)


# The held-out batches


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_held_out_split_is_covered_once_in_order(validation, batch_size):
    batches = HeldOutBatches(validation, LENGTH, batch_size)
    for step in range(len(batches)):
        check_form(batches[step], batch_size)
    tokens, targets = (
        torch.cat([batches[step][name].flatten() for step in range(len(batches))]) for name in ("tokens", "targets")
    )
    ids = torch.from_numpy(validation.tokens.astype(np.int64))
    scored = ids[1:][ids[1:] != BOS_ID]
    assert torch.equal(targets[targets != -100], scored)
    assert torch.equal(tokens[: len(ids)], ids)
    assert (tokens[len(ids) :] == PAD_ID).all()
    assert (targets[len(ids) - 1 :] == -100).all()
    assert len(tokens) < len(ids) - 1 + LENGTH * batch_size, "no batch may be all padding"


def test_worker_processes_get_the_name_of_the_file_only(train):
    assert len(pickle.dumps(TrainingBatches(train, LENGTH, BATCH, seed=0))) < 2000


def test_loader_starts_where_it_is_told_at_each_iteration(train):
    batches = TrainingBatches(train, LENGTH, BATCH, seed=0)
    for num_workers in (0, 2):
        loader = Loader(batches, lambda: range(5, 8), num_workers)
        for _ in range(2):
            assert all(same(left, batches[step]) for left, step in zip(loader, range(5, 8), strict=True))


# In a Trainer


class Recorder(pl.LightningModule):
    """Keeps the batches it is trained on, and fails where it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(512, 1)
        self.seen: list[dict] = []
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.fail_at:
            raise KeyError("killed")
        self.seen.append(batch)
        return self.embedding(batch["tokens"]).square().mean()

    def validation_step(self, batch, batch_idx):
        check_form(batch, BATCH // self.trainer.world_size)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(**options) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", **({"devices": 1, "enable_checkpointing": "callbacks" in options} | quiet | options)
    )


def make_data(prepared, **options) -> TokenDataModule:
    return TokenDataModule(str(prepared), **({"block_length": LENGTH, "batch_size": BATCH} | options))


def fit(prepared, checkpoint=None, fail_at=None, num_workers=0, **trainer_options) -> Recorder:
    model = Recorder(fail_at)
    trainer = make_trainer(**({"limit_val_batches": 0} | trainer_options))
    try:
        trainer.fit(model, make_data(prepared, num_workers=num_workers), ckpt_path=checkpoint)
    except KeyError:
        assert fail_at is not None
    return model


CHECKPOINTS = {
    "after training steps": (lambda folder: ModelCheckpoint(folder, "saved", every_n_train_steps=2), {}),
    "after validation": (
        lambda folder: ModelCheckpoint(folder, "saved", save_on_train_epoch_end=False),
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_val_batches": 1},
    ),
    "at the failure": (lambda folder: OnExceptionCheckpoint(folder, "saved"), {}),
    "in epochs of a limited length": (
        lambda folder: ModelCheckpoint(folder, "saved", every_n_train_steps=2),
        {"limit_train_batches": 6},
    ),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("when", CHECKPOINTS)
def test_resume_goes_on_with_the_next_batch(prepared, train, tmp_path, num_workers, accumulate, when):
    make_checkpoint, options = CHECKPOINTS[when]
    options = options | {"accumulate_grad_batches": accumulate, "max_steps": 16 // accumulate}
    blocks = TrainingBatches(train, LENGTH, BATCH, seed=0).blocks
    assert 0 < 8 * BATCH // blocks < 16 * BATCH // blocks, "resume in a later epoch, and go on beyond its end"

    undisturbed = fit(prepared, **options)
    batches = TrainingBatches(train, LENGTH, BATCH, seed=0)
    assert len(undisturbed.seen) == 16
    assert all(same(batch, batches[step]) for step, batch in enumerate(undisturbed.seen))

    options |= {"callbacks": [make_checkpoint(tmp_path)]}
    fit(prepared, fail_at=10, num_workers=num_workers, **options)
    resumed = fit(prepared, checkpoint=tmp_path / "saved.ckpt", num_workers=num_workers, **options)
    first = 16 - len(resumed.seen)
    assert first == (10 if accumulate == 1 and when != "after validation" or when == "at the failure" else 8)
    assert all(same(left, right) for left, right in zip(resumed.seen, undisturbed.seen[first:], strict=True))
    assert torch.equal(resumed.embedding.weight, undisturbed.embedding.weight)


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 3}, {"block_length": 32}])
def test_resume_with_other_data_is_refused(prepared, tmp_path, change):
    callbacks = [ModelCheckpoint(tmp_path, "saved", every_n_train_steps=1)]
    trainer = make_trainer(max_steps=1, limit_val_batches=0, callbacks=callbacks)
    trainer.fit(Recorder(), make_data(prepared))
    (name,) = change
    with pytest.raises(ValueError, match=f"checkpoint was trained with another {name}"):
        make_trainer(max_steps=2).fit(Recorder(), make_data(prepared, **change), ckpt_path=tmp_path / "saved.ckpt")
    # Testing the weights on something else is no mistake.
    make_trainer().test(
        Recorder(), make_data(prepared, **({"block_length": LENGTH} | {"seed": 1})), ckpt_path=tmp_path / "saved.ckpt"
    )


def test_two_processes_train_on_one_global_batch(prepared, train, tmp_path):
    class Saver(Recorder):
        def on_train_end(self):
            torch.save(self.seen, tmp_path / f"{self.global_rank}.pt")

    trainer = make_trainer(max_steps=3, limit_val_batches=2, devices=2, strategy="ddp_fork")
    trainer.fit(Saver(), make_data(prepared))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    batches = TrainingBatches(train, LENGTH, BATCH, seed=0)
    for step in range(3):
        assert same({name: torch.cat([part[step][name] for part in parts]) for name in parts[0][0]}, batches[step])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_length": 0}, "block_length is 0: it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"num_workers": -1}, "num_workers is -1: it must be at least 0"),
    ],
)
def test_wrong_numbers(prepared, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_data(prepared, **options)


def test_what_a_data_module_lacks_is_named():
    class Half(StepwiseDataModule):
        """No training_batches."""

    with pytest.raises(NotImplementedError, match="Half does not define training_batches"):
        Half().training_batches(0, 1)


def test_folder_that_is_not_prepared(tmp_path):
    with pytest.raises(FileNotFoundError, match="no prepared data in"):
        make_trainer(max_steps=1).fit(Recorder(), make_data(tmp_path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs(path):
    config = yaml.safe_load(path.read_text())
    module, _, name = config["class_path"].rpartition(".")
    data = getattr(import_module(module), name)(**config["init_args"])
    assert isinstance(data, TokenDataModule)
