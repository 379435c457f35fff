"""A LanguageModel as lm-eval sees it.

A context is read once: the requests that share it (the choices of a question; all sentences of a test without contexts)
continue from copies of the state after it. Rows of different length stand in one batch, padded on the right and masked,
and a masked run equals the run without its masked steps: so no score depends on the batch or on the order.

Where lm-eval's own models leave a choice, this one follows them: how a request is split into context and continuation,
how rolling windows are cut, and that a context that is too long loses its beginning, BOS included. Unlike theirs, it
keeps a continuation whole even where that is longer than max_length.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer
from ssm_trn.evaluation.runs import data_settings
from ssm_trn.evaluation.scoring import log_probabilities
from ssm_trn.model import LanguageModel
from ssm_trn.state import map_state

logger = logging.getLogger(__name__)
T = TypeVar("T")
DEFAULT_BATCH_SIZE = 16
_GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature"}


@register_model("ssm_trn")
class HarnessModel(TemplateLM):
    """A trained model, or one in memory, for `lm_eval.evaluate`; `--model ssm_trn` on lm-eval's command line.

    Args:
        pretrained: a run folder (config.json, model.safetensors, tokenizer.model), or a LanguageModel, which goes to
            the device and into evaluation mode.
        tokenizer: for a LanguageModel, its tokenizer.
        batch_size: contexts, and continuations, at once. "auto" is the default: the result does not depend on it.
        max_length: most tokens that the model reads for one request; by default the block length of the run's training.
        device: such as "cpu" or "cuda:0"; by default a GPU where there is one. Where a GPU is named and there is none
            (lm-eval's command line names cuda:0 on every machine), the CPU.
        max_batch_size: accepted from lm-eval's command line, and not needed.
        seed: of sampled generations.

    Raises:
        FileNotFoundError: if the folder holds no trained model.
        ValueError: for values that do not fit.
    """

    def __init__(
        self,
        pretrained: str | PathLike | LanguageModel,
        tokenizer: Tokenizer | None = None,
        batch_size: int | str | None = DEFAULT_BATCH_SIZE,
        max_length: int | None = None,
        device: str | torch.device | None = None,
        max_batch_size: int | str | None = None,
        seed: int = 0,
        **unknown,
    ):
        super().__init__()
        if unknown:
            known = [name for name in signature(HarnessModel).parameters if name != "unknown"]
            raise ValueError(f"the model 'ssm_trn' has no argument '{min(unknown)}': it takes {', '.join(known)}")
        self._device = _available(device)
        if isinstance(pretrained, str | PathLike):
            folder = Path(pretrained)
            pretrained = LanguageModel.from_pretrained(folder)
            tokenizer = tokenizer or Tokenizer.load(folder / "tokenizer.model")
            max_length = data_settings(folder).get("block_length") if max_length is None else max_length
        if tokenizer is None:
            raise ValueError("a LanguageModel comes without a tokenizer: pass tokenizer=, or the path of a run folder")
        if pretrained.config.vocab_size != tokenizer.vocab_size:
            raise ValueError(
                f"the model has {pretrained.config.vocab_size} tokens, the tokenizer {tokenizer.vocab_size}: "
                "they are not of one run"
            )
        self.model = pretrained.to(self._device).eval()
        self.tokenizer = tokenizer
        self.batch_size = _batch_size(batch_size)
        if max_length is None:
            raise ValueError("the length that the model was trained at is not known here: give max_length")
        self.max_length = int(max_length)
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 2: a token and its context")
        self._generator = torch.Generator(self._device).manual_seed(seed)

    @property
    def eot_token_id(self) -> int:
        return EOS_ID

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text: the BOS that each document began with in training."""
        return BOS_ID

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """The tokens of a text, with BOS in front unless add_special_tokens is False."""
        tokens = self.tokenizer.encode(string)
        return tokens if add_special_tokens is False else [BOS_ID, *tokens]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of context and continuation, split as lm-eval splits them.

        Spaces at the end of the context go to the continuation, and the continuation is what the whole has beyond the
        length of the context. Where that is nothing, because the tokenizer merged all of it into the context's last
        token, that token is scored.
        """
        if not continuation:
            raise ValueError(f"a request has an empty continuation, there is nothing to score (context: {context!r})")
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before, whole = self.tok_encode(stripped), self.tok_encode(stripped + continuation)
        if len(whole) <= len(before):
            before = whole[:-1]
        return before, whole[len(before) :]

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each request (context, continuation): log p(continuation | context), and whether each of its tokens is
        the likeliest. An empty context is a BOS."""
        encoded = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(encoded, disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """For each request (text,): its log-probability, each token scored once, in windows of max_length as lm-eval
        cuts them: each sees one token before its own, only the last as many as fit."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, BOS_ID, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """The same for requests as (key of the cache or None, tokens of the context, tokens of the continuation)."""
        sharing = defaultdict(list)  # requests by their context
        truncated = 0
        for index, (_, context, continuation) in enumerate(requests):
            room = max(self.max_length + 1 - len(continuation), 1)
            truncated += len(context) > room
            sharing[tuple(context[-room:])].append(index)
        if truncated:
            logger.warning(
                "%d of %d contexts lost their beginning to max_length %d", truncated, len(requests), self.max_length
            )
        longest = {context: max(len(requests[i][2]) for i in indices) for context, indices in sharing.items()}
        ordered = sorted(sharing, key=lambda context: (-len(context), -longest[context], context))
        answers: list = [None] * len(requests)
        with tqdm(total=len(requests), desc="log-likelihood", disable=disable_tqdm) as progress:
            for contexts in _batches(ordered, self.batch_size):
                state, last = self._read(contexts, max(longest[context] for context in contexts))
                pairs = [(row, index) for row, context in enumerate(contexts) for index in sharing[context]]
                pairs.sort(key=lambda pair: (-len(requests[pair[1]][2]), pair))
                for batch in _batches(pairs, self.batch_size):
                    rows = torch.tensor([row for row, _ in batch], device=self._device)
                    scores = self._continue(state, last, rows, [requests[index][2] for _, index in batch])
                    for (_, index), score in zip(batch, scores, strict=True):
                        answers[index] = score
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], score)
                    progress.update(len(batch))
        return answers

    def _read(self, contexts: Sequence[Sequence[int]], room: int):
        """The state after each of B contexts, with room for more tokens, and the last features [B, d_model]."""
        tokens, mask = self._pad(contexts)  # [B, T]
        state = self.model.init_state(len(contexts), tokens.shape[1] + room)
        features, state = self.model.features(tokens, state, mask=_unless_full(mask))  # [B, T, d_model]
        return state, features[torch.arange(len(contexts), device=self._device), mask.sum(1) - 1]

    def _continue(self, state, last: Tensor, rows: Tensor, continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Scores of N continuations, the n-th from row rows[n] of the state and of the last features [B, d_model]."""
        targets, mask = self._pad(continuations)  # [N, T]
        features = last[rows, None]  # [N, 1, d_model]
        if targets.shape[1] > 1:
            # A row's last token is only predicted, never read; the step that would read it is masked.
            inputs, real = targets[:, :-1], mask[:, 1:]
            new, _ = self.model.features(inputs, map_state(lambda x: x[rows], state), mask=_unless_full(real))
            features = torch.cat([features, new], 1)  # [N, T, d_model]
        score, greedy = log_probabilities(self.model, features[mask], targets[mask])
        scores = torch.zeros(mask.shape, dtype=torch.float64, device=self._device)
        scores[mask] = score.double()
        likeliest = torch.ones_like(mask)
        likeliest[mask] = greedy
        return list(zip(scores.sum(1).tolist(), likeliest.all(1).tolist(), strict=True))

    @torch.inference_mode()
    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """For each request (context, options): what follows, up to EOS, a stop string or the most tokens asked for.

        Options: until, max_gen_toks, do_sample, temperature. A context keeps its last max_length - max_gen_toks tokens.
        """
        alike = defaultdict(list)  # requests by their options
        for index, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(index)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="generation", disable=disable_tqdm) as progress:
            for key, indices in alike.items():
                options = self._generation_options(json.loads(key))
                room = self.max_length - options["max_gen_toks"]
                prompts = {index: self.tok_encode(requests[index].args[0])[-room:] for index in indices}
                for batch in _batches(sorted(indices, key=lambda index: -len(prompts[index])), self.batch_size):
                    for index, text in zip(batch, self._generate([prompts[i] for i in batch], options), strict=True):
                        answers[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    progress.update(len(batch))
        return answers

    def _generation_options(self, options: dict) -> dict:
        options = dict(normalize_gen_kwargs(options, default_max_gen_toks=min(256, self.max_length // 2)))
        unknown = options.keys() - _GENERATION_OPTIONS
        if unknown:
            raise ValueError(
                f"generation knows no {', '.join(sorted(unknown))}: it takes {', '.join(sorted(_GENERATION_OPTIONS))}"
            )
        if not 0 < options["max_gen_toks"] < self.max_length:
            raise ValueError(
                f"max_gen_toks {options['max_gen_toks']} leaves no room for a context in max_length {self.max_length}: "
                "ask for fewer tokens or give the model a larger max_length"
            )
        return options

    def _generate(self, prompts: list[list[int]], options: dict) -> list[str]:
        """What follows each prompt: the prompts in one pass, then one step a token for all rows that are not done."""
        temperature = options.get("temperature", 1.0) if options["do_sample"] else 0.0
        state, last = self._read(prompts, options["max_gen_toks"])
        generated: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        running = set(range(len(prompts)))
        while True:
            chosen = self._choose(self.model.logits(last), temperature)  # [B]
            for row, token in enumerate(chosen.tolist()):
                if row in running:
                    generated[row].append(token)
                    texts[row], stopped = _cut(self.tokenizer.decode(generated[row]), options["until"])
                    if stopped or token == EOS_ID or len(generated[row]) == options["max_gen_toks"]:
                        running.remove(row)
            if not running:
                return texts
            features, state = self.model.features(chosen[:, None], state)
            last = features[:, 0]

    def _choose(self, logits: Tensor, temperature: float) -> Tensor:
        """A next token [B] for logits [B, V]: the likeliest, or one drawn at a temperature above 0."""
        if not temperature:
            return logits.argmax(1)
        weights = (logits.float() / temperature).softmax(1)
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0]

    def _pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Rows of tokens as int64 [B, T], padded on the right, and the mask [B, T] of real ones."""
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        tokens = torch.full((len(rows), int(lengths.max())), PAD_ID, device=self._device)
        mask = torch.arange(tokens.shape[1], device=self._device) < lengths[:, None]
        tokens[mask] = torch.tensor([token for row in rows for token in row], device=self._device)
        return tokens, mask


def _unless_full(mask: Tensor) -> Tensor | None:
    """No mask where nothing is masked: attention has a faster form for that."""
    return None if bool(mask.all()) else mask


def _cut(text: str, until: list[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there was one."""
    ends = [text.find(stop) for stop in until if stop and stop in text]
    return (text[: min(ends)], True) if ends else (text, False)


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _batch_size(value: int | str | None) -> int:
    """lm-eval's command line passes numbers as strings, and "auto" or "auto:4"."""
    if value is None or str(value).startswith("auto"):
        return DEFAULT_BATCH_SIZE
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"batch_size is '{value}'; it must be 'auto' or a number of at least 1")
    return int(value)


def _available(device: str | torch.device | None) -> torch.device:
    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"'{device}' names no device: choose cpu, or a GPU such as cuda:0") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        logger.warning("there is no %s on this machine: evaluating on the CPU", wanted)
        return torch.device("cpu")
    try:
        torch.empty(1, device=wanted).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"there is no device '{device}' on this machine: choose cpu, or a GPU it has") from error
    return wanted
