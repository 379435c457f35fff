"""Batches of fixed-length blocks. What a batch holds depends on (seed, step) and on nothing else.

The ids of a split, documents one after the other, are cut into blocks of L = block_length steps:

    block i:   tokens = ids[i L : i L + L]        targets = ids[i L + 1 : i L + L + 1]

so that each id but the very first is a target once. In training, epoch e visits the blocks in an order drawn from
(seed, e), and the epochs follow one another without an end. Step s takes the places s B to s B + B - 1 of that row
(B = batch_size), and rank r of W takes the r-th part of them: the global batch is the same for any number of ranks and
loader workers, and to resume is to go on with the next step. How many steps are done is Lightning's own count, which is
in each checkpoint; loaders are not asked, since they run ahead.

A batch is a dict of tensors that all have the shape [B / W, L]:

    tokens    int64
    targets   int64, -100 where nothing is scored: at the step that would predict a BOS, and in padding
    reset     bool, True at a BOS, where a new document starts
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import count
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ssm_trn.data.token_file import TokenFile
from ssm_trn.data.tokenizer import BOS_ID, PAD_ID, Tokenizer

IGNORED = -100

Batch = dict[str, Tensor]


class StepwiseDataModule(pl.LightningDataModule):
    """What data modules share whose training batches depend on their step alone: to resume is to go on with the next.

    A subclass has `num_workers`, makes `training_batches`, and names in `state_dict` what else decides their content.
    """

    num_workers: int

    def training_batches(self, rank: int, world_size: int) -> Dataset[Batch]:
        """The endless row of batches, of which this process takes its part: item s is the batch of step s."""
        raise NotImplementedError(f"{type(self).__name__} does not define training_batches")

    def train_dataloader(self) -> "Loader":
        """Batches without end, from the first step that training has not done yet."""
        batches = self.training_batches(*self.rank())
        # `processed` counts the batches whose training step has ended, those of a run that is resumed included.
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return Loader(batches, lambda: count(progress.processed), self.num_workers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if training would go on with other data than the checkpoint's."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        changed = [name for name, value in self.state_dict().items() if state_dict.get(name) != value]
        if changed:
            raise ValueError(
                f"the checkpoint was trained with another {' and '.join(changed)}, and step s meant other data there: "
                "resume with the same data settings, or start a new run"
            )

    def rank(self) -> tuple[int, int]:
        """Which part of a batch this process takes, of how many."""
        place = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return place["rank"], place["num_replicas"]


class TokenDataModule(StepwiseDataModule):
    """Trains on the train split of a folder that `ssm-trn prepare` made, validates and tests on its held-out split."""

    def __init__(
        self, folder: str, block_length: int = 256, batch_size: int = 32, seed: int = 0, num_workers: int = 0
    ) -> None:
        """
        Args:
            folder: The prepared folder.
            block_length: Steps of a block: the context that the model is trained with.
            batch_size: Blocks of a batch over all devices together.
            seed: Decides the order of the training blocks.
            num_workers: Processes that make batches ahead of time; what is in them does not depend on it.
        """
        super().__init__()
        numbers = {"block_length": (block_length, 1), "batch_size": (batch_size, 1), "seed": (seed, 0)}
        for name, (value, least) in (numbers | {"num_workers": (num_workers, 0)}).items():
            if value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        self.folder, self.block_length, self.batch_size = folder, block_length, batch_size
        self.seed, self.num_workers = seed, num_workers
        self.train: TokenFile | None = None  # opened for training only

    def setup(self, stage: str) -> None:
        """Opens the token files. Raises FileNotFoundError or ValueError if the folder is not whole."""
        self.validation = TokenFile.open(self.folder, "validation")
        if stage == "fit":
            self.train = TokenFile.open(self.folder, "train")
            count_blocks(self.train, self.block_length)  # before a validation with blocks of that length

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder, after `setup`."""
        return self.validation.tokenizer

    def training_batches(self, rank: int, world_size: int) -> "TrainingBatches":
        return TrainingBatches(self.train, self.block_length, self.batch_size, self.seed, rank, world_size)

    def blocks_of(self, step: int) -> list[int]:
        """Which blocks of the train split the batch of a step holds, on all devices together."""
        return TrainingBatches(self.train, self.block_length, self.batch_size, self.seed).blocks_of(step).tolist()

    def val_dataloader(self) -> "SizedLoader":
        """Each id of the held-out split once, in its order."""
        batches = HeldOutBatches(self.validation, self.block_length, self.batch_size, *self.rank())
        return SizedLoader(batches, lambda: range(len(batches)), self.num_workers)

    test_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """What decides the content of step s: a checkpoint is only resumed with the same."""
        if self.train is None:
            return {}
        return {
            "tokens": self.train.sha256,
            "block_length": self.block_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }


def count_blocks(tokens: TokenFile, block_length: int) -> int:
    """The whole blocks in a split; a ValueError if there is none."""
    blocks = (len(tokens) - 1) // block_length
    if blocks < 1:
        raise ValueError(
            f"the {tokens.split} split has {len(tokens)} tokens, fewer than one block of {block_length} + 1: "
            "prepare more text or choose a smaller block_length"
        )
    return blocks


class TrainingBatches(Dataset[Batch]):
    """The endless row of training batches: item s is the batch of step s."""

    def __init__(
        self, tokens: TokenFile, block_length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        """Raises ValueError if the split is shorter than a block, or the batch does not divide among the ranks."""
        self.blocks = count_blocks(tokens, block_length)
        self._tokens, self._block_length, self._seed = tokens, block_length, seed
        self._batch_size, self._rows = batch_size, rows_of(rank, world_size, batch_size)

    def __getitem__(self, step: int) -> Batch:
        blocks = self.blocks_of(step)
        positions = blocks[:, None] * self._block_length + np.arange(self._block_length + 1)  # [rows, L + 1]
        return _batch(self._tokens.ids(positions))

    def blocks_of(self, step: int) -> np.ndarray:
        """int64 [rows]: which blocks the batch of a step holds."""
        places = step * self._batch_size + self._rows  # [rows] in the row of epochs
        epochs, indices = np.divmod(places, self.blocks)
        blocks = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            blocks[here] = epoch_order(self._seed, int(epoch), self.blocks)[indices[here]]
        return blocks


class HeldOutBatches(Dataset[Batch]):
    """The blocks of a split in their order; the last block and the last batch are filled up with padding."""

    def __init__(
        self, tokens: TokenFile, block_length: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self._tokens, self._block_length = tokens, block_length
        self._batch_size, self._rows = batch_size, rows_of(rank, world_size, batch_size)

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // (self._block_length * self._batch_size))

    def __getitem__(self, step: int) -> Batch:
        blocks = step * self._batch_size + self._rows
        positions = blocks[:, None] * self._block_length + np.arange(self._block_length + 1)  # [rows, L + 1]
        last = len(self._tokens) - 1
        ids = self._tokens.ids(np.minimum(positions, last))
        return _batch(np.where(positions <= last, ids, PAD_ID))


class Loader:
    """Goes through the items of a data set at given steps, which worker processes make ahead of time.

    Not a DataLoader itself, as Lightning would give that a sampler of its own.
    """

    def __init__(self, dataset: Dataset[Batch], steps: Callable[[], Iterable[int]], num_workers: int) -> None:
        """`steps` is called at the start of each iteration."""
        self.dataset, self._steps, self._num_workers = dataset, steps, num_workers

    def __iter__(self) -> Iterator[Batch]:
        # A generator: Lightning calls iter() once more than it needs, which must not start workers.
        try:
            yield from DataLoader(self.dataset, batch_size=None, sampler=self._steps(), num_workers=self._num_workers)
        except ValueError as error:  # of a worker process: its traceback, and what was wrong at the end
            raise ValueError(str(error).rpartition("ValueError: ")[2].strip()) from error


class SizedLoader(Loader):
    """A loader whose number of batches Lightning may know."""

    def __len__(self) -> int:
        return len(self.dataset)


@lru_cache(maxsize=2)  # a batch is of one epoch, or of the end of one and the start of the next
def epoch_order(seed: int, epoch: int, blocks: int) -> np.ndarray:
    # RandomState, since numpy promises that its numbers never change; those of default_rng may with a release.
    return np.random.RandomState([seed, epoch]).permutation(blocks)


def rows_of(rank: int, world_size: int, batch_size: int) -> np.ndarray:
    """The rows of the global batch that a rank takes."""
    if batch_size % world_size:
        raise ValueError(f"batch_size {batch_size} is not divisible by the {world_size} devices that share a batch")
    rows = batch_size // world_size
    return np.arange(rank * rows, (rank + 1) * rows)


def _batch(ids: np.ndarray) -> Batch:
    """Tensors of `ids`, [rows, L + 1]."""
    block = torch.from_numpy(ids.astype(np.int64))
    tokens, targets = block[:, :-1], block[:, 1:]
    scored = (targets != BOS_ID) & (targets != PAD_ID)
    return {
        "tokens": tokens.contiguous(),
        "targets": torch.where(scored, targets, IGNORED),
        "reset": tokens == BOS_ID,
    }
