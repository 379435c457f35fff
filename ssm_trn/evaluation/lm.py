"""A LanguageModel as lm-eval sees it.

A context is read once: the requests that share it (the choices of a question; all sentences of a test without contexts)
continue from copies of the state after it. Rows of different length stand in one batch, padded and masked, and a masked
run equals the run without its masked steps: so no score depends on the batch or on the order.

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

from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, Tokenizer
from ssm_trn.evaluation.runs import data_settings
from ssm_trn.evaluation.scoring import log_probabilities
from ssm_trn.generation.loop import Generation, padded, prefill, unless_full
from ssm_trn.generation.sampling import Sampling
from ssm_trn.generation.text import require_same_vocabulary, stream_text
from ssm_trn.model import LanguageModel
from ssm_trn.runtime import available_device
from ssm_trn.state import map_state

logger = logging.getLogger(__name__)
T = TypeVar("T")
DEFAULT_BATCH_SIZE = 16
_SAMPLING_OPTIONS = ("top_k", "top_p", "repetition_penalty")
_GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", *_SAMPLING_OPTIONS}


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
        seed: of sampled generations; the n-th request of a call has seed + n.

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
        self._device = available_device(device)
        if isinstance(pretrained, str | PathLike):
            folder = Path(pretrained)
            pretrained = LanguageModel.from_pretrained(folder)
            tokenizer = tokenizer or Tokenizer.load(folder / "tokenizer.model")
            max_length = data_settings(folder).get("block_length") if max_length is None else max_length
        if tokenizer is None:
            raise ValueError("a LanguageModel comes without a tokenizer: pass tokenizer=, or the path of a run folder")
        require_same_vocabulary(pretrained, tokenizer)
        self.model = pretrained.to(self._device).eval()
        self.tokenizer = tokenizer
        self.batch_size = _batch_size(batch_size)
        if max_length is None:
            raise ValueError("the length that the model was trained at is not known here: give max_length")
        self.max_length = int(max_length)
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 2: a token and its context")
        self._seed = int(seed)

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
        state = self.model.init_state(len(contexts), max(map(len, contexts)) + room)
        last, state = prefill(self.model, contexts, state)
        return state, last

    def _continue(self, state, last: Tensor, rows: Tensor, continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Scores of N continuations, the n-th from row rows[n] of the state and of the last features [B, d_model]."""
        targets, mask = padded(continuations, self._device)  # [N, T]
        features = last[rows, None]  # [N, 1, d_model]
        if targets.shape[1] > 1:
            # A row's last token is only predicted, never read; the step that would read it is masked.
            inputs, real = targets[:, :-1], mask[:, 1:]
            new, _ = self.model.features(inputs, map_state(lambda x: x[rows], state), mask=unless_full(real))
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

        Options: until, max_gen_toks, do_sample, temperature, top_k, top_p, repetition_penalty. A context keeps its last
        max_length - max_gen_toks tokens.
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
                    texts = self._generate([prompts[i] for i in batch], [self._seed + i for i in batch], options)
                    for index, text in zip(batch, texts, strict=True):
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

    def _generate(self, prompts: list[list[int]], seeds: list[int], options: dict) -> list[str]:
        """What follows each prompt."""
        generation = Generation(
            self.model,
            prompts,
            options["max_gen_toks"],
            sampling=_sampling(options),
            stop_tokens=[EOS_ID],
            seed=seeds,
        )
        texts = [""] * len(prompts)
        for pieces in stream_text(generation, self.tokenizer, list(filter(None, options["until"]))):
            texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
        return texts


def _sampling(options: dict) -> Sampling:
    """The options as lm-eval's other models read them: without do_sample the likeliest token; top_k 0 is none."""
    temperature = float(options.get("temperature", 1.0)) if options["do_sample"] else 0.0
    given = {name: options[name] for name in _SAMPLING_OPTIONS if options.get(name)}
    return Sampling(temperature, **given)


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _batch_size(value: int | str | None) -> int:
    """lm-eval's command line passes numbers as strings, and "auto" or "auto:4"."""
    if value is None or str(value).startswith("auto"):
        return DEFAULT_BATCH_SIZE
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"batch_size is '{value}'; it must be 'auto' or a number of at least 1")
    return int(value)
