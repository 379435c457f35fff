"""Log-probabilities of continuations, each context read once.

Requests that share a context continue from copies of the state after it, be that a recurrent state or a cache of keys
and values. What many contexts begin with, as the examples of a few-shot test, is read once for a batch of them. Rows of
different length stand in one batch, padded and masked, and a masked run equals the run without its masked steps: so no
score depends on the batch or on the order.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import TypeVar

import torch
from torch import Tensor, nn

from ssm_trn.evaluation.scoring import log_probabilities
from ssm_trn.generation.loop import padded, prefill, unless_full
from ssm_trn.state import map_state

logger = logging.getLogger(__name__)
T = TypeVar("T")
Tokens = Sequence[int]
_HEADER = 64  # tokens that contexts must begin with alike for their beginning to be read once


@torch.inference_mode()
def score_continuations(
    model, pairs: Sequence[tuple[Tokens, Tokens]], max_length: int, batch_size: int
) -> Iterator[tuple[int, float, bool]]:
    """Scores N continuations behind their contexts.

    Args:
        model: a LanguageModel.
        pairs: tokens of each context and of its continuation, at least one each. A context that is too long loses its
            beginning, a continuation is kept whole.
        max_length: most tokens that the model reads for one pair, if the continuation allows it.
        batch_size: contexts, and continuations, at once; the scores do not depend on it.

    Yields:
        In any order: number of a pair, log p(continuation | context), and whether each of its tokens is the likeliest.
    """
    sharing = defaultdict(list)  # numbers of pairs by their context
    truncated = 0
    for number, (context, continuation) in enumerate(pairs):
        room = max(max_length + 1 - len(continuation), 1)
        truncated += len(context) > room
        sharing[tuple(context[-room:])].append(number)
    if truncated:
        logger.warning("%d of %d contexts lost their beginning to max_length %d", truncated, len(pairs), max_length)
    longest = {context: max(len(pairs[i][1]) for i in numbers) for context, numbers in sharing.items()}
    headers = Counter(context[:_HEADER] for context in sharing)
    common = {header for header, count in headers.items() if len(header) == _HEADER and count >= batch_size}

    def place(context: tuple[int, ...]) -> tuple:
        """Contexts with a common beginning side by side, and the longest first."""
        header = context[:_HEADER]
        return header if header in common else (), -len(context), -longest[context], context

    for contexts in batches(sorted(sharing, key=place), batch_size):
        state, last = _read(model, contexts, max(longest[context] for context in contexts))
        rows = [(row, number) for row, context in enumerate(contexts) for number in sharing[context]]
        rows.sort(key=lambda row: (-len(pairs[row[1]][1]), row))
        for batch in batches(rows, batch_size):
            index = torch.tensor([row for row, _ in batch], device=last.device)
            scores, greedy = _continue(model, state, last, index, [pairs[number][1] for _, number in batch])
            for (_, number), score, likeliest in zip(batch, scores.tolist(), greedy.tolist(), strict=True):
                yield number, score, likeliest


@torch.inference_mode()
def score_texts(
    model, texts: Sequence[Tokens], prefix: int, chunk_size: int, batch_size: int
) -> Iterator[tuple[int, float]]:
    """Scores N whole texts, each token behind all that is before it: the state is carried from beginning to end.

    Args:
        model: a LanguageModel.
        texts: their tokens.
        prefix: the token that stands before a text and is not scored.
        chunk_size: steps at once; the scores do not depend on it, nor on batch_size, texts at once.

    Yields:
        In any order: number of a text and its log-probability.
    """
    device = next(model.parameters()).device
    for batch in batches(sorted(range(len(texts)), key=lambda number: -len(texts[number])), batch_size):
        targets, mask = padded([texts[number] or [prefix] for number in batch], device)  # [B, T]
        mask &= torch.tensor([bool(texts[number]) for number in batch], device=device)[:, None]  # an empty one scores 0
        inputs = nn.functional.pad(targets[:, :-1], (1, 0), value=prefix)
        state, sums = None, torch.zeros(len(batch), dtype=torch.float64, device=device)
        pieces = (x.split(chunk_size, 1) for x in (inputs, targets, mask))
        for piece, target, real in zip(*pieces, strict=True):
            features, state = model.features(piece, state, mask=unless_full(real))  # [B, t, d_model]
            sums += _row_scores(model, features, target, real)[0]
        yield from zip(batch, sums.tolist(), strict=True)


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items, `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _read(model, contexts: Sequence[Tokens], room: int):
    """The state after each of B contexts, with room for more tokens, and the last features [B, d_model]."""
    rows, length = len(contexts), max(map(len, contexts)) + room
    shared = min(len(commonprefix(contexts)), min(map(len, contexts)) - 1)
    if rows == 1 or shared < _HEADER:
        last, state = prefill(model, contexts, model.init_state(rows, length))
        return state, last
    _, state = prefill(model, [contexts[0][:shared]], model.init_state(1, length))
    state = map_state(lambda x: x.repeat_interleave(rows, 0), state)
    last, state = prefill(model, [context[shared:] for context in contexts], state)
    return state, last


def _continue(model, state, last: Tensor, rows: Tensor, continuations: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Scores [N] and greedy [N] of continuations, the n-th from row rows[n] of the state and of last [B, d_model]."""
    targets, mask = padded(continuations, last.device)  # [N, T]
    features = last[rows, None]  # [N, 1, d_model]
    if targets.shape[1] > 1:
        # A row's last token is only predicted, never read; the step that would read it is masked.
        inputs, real = targets[:, :-1], mask[:, 1:]
        new, _ = model.features(inputs, map_state(lambda x: x[rows], state), mask=unless_full(real))
        features = torch.cat([features, new], 1)  # [N, T, d_model]
    return _row_scores(model, features, targets, mask)


def _row_scores(model, features: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """For features [N, T, d_model] and the tokens [N, T] after them: the sum of the log-probabilities of those that the
    mask marks, float64 [N], and whether all of them are the likeliest, bool [N]."""
    scores, greedy = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device), torch.ones_like(mask)
    if mask.any():
        score, likeliest = log_probabilities(model, features[mask], targets[mask])
        scores[mask], greedy[mask] = score.double(), likeliest
    return scores.sum(1), greedy.all(1)
