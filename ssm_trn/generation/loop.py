"""Rows of tokens that grow, one step a token.

The prompts stand in one batch, padded on the left and masked; a masked run equals the run without its masked steps, so
no row depends on its neighbours. They are read in chunks of a fixed length, so that a long prompt needs no more memory
than a chunk and the state. Rows that have ended stay in the batch as masked steps, which leaves their state as it is.

Each row draws from a random generator of its own, one number a token, made on the host: what a row becomes depends on
its prompt and its seed alone, not on the batch, its place in it, or the device.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from ssm_trn.generation.sampling import GREEDY, Sampling
from ssm_trn.layers import widened

PREFILL_CHUNK = 512
_ANY_SHAPE = ("cpu", "cuda")  # elsewhere each new shape is compiled anew: there all chunks and masks have the same


class Generation(Iterator[list[int | None]]):
    """What follows the prompts, as an iterator: each step gives the new token of each row, None where it has ended.

    Making it reads the prompts. A row ends with a stop token, which is its last one, after max_new_tokens, or when it
    is told to by `stop`.

    Args:
        model: a LanguageModel.
        prompts: B rows of token ids, of any lengths; a row begins with what the model's texts begin with, such as BOS.
        max_new_tokens: most tokens of a row.
        sampling: how a token is chosen; the likeliest by default.
        stop_tokens: ids that end a row.
        seed: of the first row, the next ones have seed + 1, seed + 2, ...; or one for each row.
        state: what came before the prompts, such as the `state` of an earlier Generation: prompts then go on from
            there, and the repetition penalty does not know what came before. It is used up: what this generation writes
            may be written into it. By default an empty one with room for all tokens; of one that `model.init_state`
            made for a longer conversation, shapes stay the same.
        chunk_size: how many steps of the prompts are read at once; the result does not depend on it.

    Attributes:
        tokens: the new tokens of each row so far.
        running: whether each row goes on.

    Raises:
        ValueError: for prompts that are empty or hold other ids than the model's, and for values out of range; from a
            step where the model's logits are NaN or inf.
    """

    @torch.no_grad()
    def __init__(
        self,
        model,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        stop_tokens: Collection[int] = (),
        seed: int | Sequence[int] = 0,
        state=None,
        chunk_size: int = PREFILL_CHUNK,
    ):
        vocab_size = model.config.vocab_size
        prompts = _checked(prompts, vocab_size)
        for name, value in (("max_new_tokens", max_new_tokens), ("chunk_size", chunk_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.running = [True] * len(prompts)
        self._model, self._sampling = model, sampling
        self._max_new_tokens, self._stop_tokens = max_new_tokens, frozenset(stop_tokens)
        self._generators = [torch.Generator().manual_seed(row_seed) for row_seed in _seeds(seed, len(prompts))]
        self._occurred = sampling.occurred(prompts, vocab_size)
        if state is None:
            length = max(map(len, prompts)) + max_new_tokens
            try:
                state = model.init_state(len(prompts), length)
            except RuntimeError as error:  # of a model whose state grows
                raise ValueError(f"a state for {length} tokens does not fit in memory: generate fewer") from error
        self._last, self._state = prefill(model, prompts, state, chunk_size)
        self._unread: list[int | None] = [None] * len(prompts)

    @torch.no_grad()
    def __next__(self) -> list[int | None]:
        if not any(self.running):
            raise StopIteration
        self._read()
        chosen = self._choose()
        self._unread = [token if goes_on else None for token, goes_on in zip(chosen, self.running, strict=True)]
        for row, token in enumerate(self._unread):
            if token is not None:
                self.tokens[row].append(token)
                if token in self._stop_tokens or len(self.tokens[row]) == self._max_new_tokens:
                    self.stop(row)
        return list(self._unread)

    def stop(self, row: int) -> None:
        """Ends a row: it gets no more tokens, and its state stays what it is after the last one."""
        self.running[row] = False

    @property
    @torch.no_grad()
    def state(self):
        """The model's state after the prompts and all new tokens; the last ones are read when it is asked for."""
        self._read()
        return self._state

    def _read(self) -> None:
        """Has the model read the newest tokens; rows that ended earlier are masked."""
        if all(token is None for token in self._unread):
            return
        new = torch.tensor([[0 if token is None else token] for token in self._unread], device=self._last.device)
        real = torch.tensor([[token is not None] for token in self._unread], device=self._last.device)
        features, self._state = self._model.features(new, self._state, mask=unless_full(real))  # [B, 1, d_model]
        self._last = features[:, 0]
        self._unread = [None] * len(self._unread)

    def _choose(self) -> list[int]:
        """The next token of each row; for those that have ended it means nothing."""
        logits = widened(self._model.logits(self._last))  # [B, V]
        if logits.device.type not in _ANY_SHAPE:
            logits = logits.cpu()  # sorting and drawing are for the host: not every accelerator can
        largest = logits.amax(-1)[torch.tensor(self.running)]  # what a masked step gives means nothing
        if not largest.isfinite().all():
            raise ValueError("the model's logits are NaN or inf: its weights are damaged, or its training diverged")
        uniform = None
        if self._sampling.temperature > 0:
            uniform = torch.cat([torch.rand(1, generator=generator) for generator in self._generators])
            uniform = uniform.to(logits.device)
        occurred = self._occurred if self._occurred is None else self._occurred.to(logits.device)
        chosen = self._sampling.choose(logits, occurred, uniform)
        if occurred is not None:
            self._occurred = occurred.scatter(1, chosen[:, None], True)
        return chosen.tolist()


def generate(model, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options) -> list[list[int]]:
    """The new tokens of each row. Arguments are those of `Generation`."""
    generation = Generation(model, prompts, max_new_tokens, **options)
    for _ in generation:
        pass
    return generation.tokens


def prefill(model, prompts: Sequence[Sequence[int]], state, chunk_size: int = PREFILL_CHUNK):
    """Reads B prompts, `chunk_size` steps at once.

    Returns:
        The features [B, d_model] after the last token of each, and the state.
    """
    device = next(model.parameters()).device
    tokens, mask = padded(prompts, device, left=True, multiple=1 if device.type in _ANY_SHAPE else chunk_size)
    for chunk, real in zip(tokens.split(chunk_size, 1), mask.split(chunk_size, 1), strict=True):
        features, state = model.features(chunk, state, mask=unless_full(real))  # [B, T, d_model]
    return features[:, -1].clone(), state  # a view would keep the whole chunk alive


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, *, left: bool = False, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Rows of tokens as int64 [B, T] and the mask bool [B, T] of real ones; padded on the right, or on the left.

    multiple: T is the length of the longest row, rounded up to a multiple of this.
    """
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    longest = -(-max(map(len, rows)) // multiple) * multiple
    steps = torch.arange(longest)
    mask = steps >= longest - lengths if left else steps < lengths  # [B, T]
    tokens = torch.zeros(mask.shape, dtype=torch.int64)  # what a masked step holds does not matter
    tokens[mask] = torch.tensor([token for row in rows for token in row])
    return tokens.to(device), mask.to(device)


def unless_full(mask: Tensor) -> Tensor | None:
    """No mask where nothing is masked, as many ops are faster then; elsewhere a graph without one would be another."""
    return None if mask.device.type in _ANY_SHAPE and bool(mask.all()) else mask


def _seeds(seed: int | Sequence[int], count: int) -> Sequence[int]:
    seeds = range(seed, seed + count) if isinstance(seed, int) else seed
    if len(seeds) != count:
        raise ValueError(f"there are {len(seeds)} seeds for {count} prompts: give one for each, or one for the first")
    if not -(2**63) <= min(seeds) <= max(seeds) < 2**64:
        raise ValueError(f"the seeds go from {min(seeds)} to {max(seeds)}: choose such as 64 bits can hold")
    return seeds


def _checked(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """The prompts as lists; a ValueError for what the model cannot read."""
    try:
        rows = [[int(token) for token in prompt] for prompt in prompts]
    except (TypeError, ValueError) as error:
        raise ValueError("prompts must be rows of token ids, such as [[1, 5, 7], [1, 9]]") from error
    if not rows:
        raise ValueError("there is no prompt: give at least one")
    for number, row in enumerate(rows, 1):
        if not row:
            raise ValueError(f"prompt {number} is empty: begin it with a token, such as the tokenizer's BOS")
        if not 0 <= min(row) <= max(row) < vocab_size:
            raise ValueError(
                f"prompt {number} has ids from {min(row)} to {max(row)}, the model knows 0 to {vocab_size - 1}: are "
                "they of another tokenizer?"
            )
    return rows
