"""A LanguageModel as lm-eval sees it.

How requests are scored, each context read once, is in likelihoods.py. Where lm-eval's own models leave a choice, this
one follows them: how a request is split into context and continuation, how rolling windows are cut, and that a context
that is too long loses its beginning, BOS included. Unlike theirs, it keeps a continuation whole even where that is
longer than max_length.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from torch import nn
from tqdm import tqdm

from ssm_trn.data.token_file import TOKENIZER_FILE
from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, Tokenizer
from ssm_trn.evaluation.likelihoods import batches, score_continuations, score_texts
from ssm_trn.evaluation.runs import data_settings
from ssm_trn.generation.loop import Generation
from ssm_trn.generation.sampling import Sampling
from ssm_trn.generation.text import require_same_vocabulary, stream_text
from ssm_trn.interop.tokenizer import TOKENIZER_FILES
from ssm_trn.model import LanguageModel
from ssm_trn.runtime import available_device

DEFAULT_BATCH_SIZE = 16
WINDOWS, STATE = "windows", "state"
_FINGERPRINT = "ssm_trn model"  # the key in lm-eval's cache under which it is written whose answers these are
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
        rolling: how whole texts are scored: "windows" of max_length, as lm-eval's other models do, or with the "state"
            carried from the beginning of a text to its end, for models whose state does not grow.

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
        seed: int | str = 0,
        rolling: str = WINDOWS,
        **unknown,
    ):
        super().__init__()
        if unknown:
            known = [name for name in signature(HarnessModel).parameters if name != "unknown"]
            raise ValueError(f"the model 'ssm_trn' has no argument '{min(unknown)}': it takes {', '.join(known)}")
        self._device = available_device(device)
        if not isinstance(pretrained, nn.Module):
            folder = Path(str(pretrained))  # a name of digits arrives as a number
            pretrained = LanguageModel.from_pretrained(folder)
            tokenizer = tokenizer or _tokenizer(folder)
            max_length = data_settings(folder).get("block_length") if max_length is None else max_length
        if tokenizer is None:
            raise ValueError("a LanguageModel comes without a tokenizer: pass tokenizer=, or the path of a run folder")
        require_same_vocabulary(pretrained, tokenizer)
        self.model = pretrained.to(self._device).eval()
        self.tokenizer = tokenizer
        self.batch_size = _batch_size(batch_size)
        if max_length is None:
            raise ValueError("the length that the model was trained at is not known here: give max_length")
        self.max_length, self._seed = _whole_number("max_length", max_length), _whole_number("seed", seed)
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 2: a token and its context")
        self.rolling = rolling
        if rolling not in (WINDOWS, STATE):
            raise ValueError(f"rolling is '{rolling}': choose {WINDOWS} or {STATE}")
        if rolling == STATE and self.model.state_size(self.max_length) != self.model.state_size(2 * self.max_length):
            raise ValueError(
                f"rolling={STATE} is for models whose state does not grow, and this one has attention over more than "
                f"{self.max_length} tokens: choose rolling={WINDOWS}"
            )

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None):
        """The model of --model_args, whose values go before those of lm-eval's own options."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if "pretrained" not in arg_dict:
            raise ValueError("the model 'ssm_trn' is one of a folder: name it with --model_args pretrained=RUN_DIR")
        return cls(**{**given, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None):
        """The same from one string, such as "pretrained=RUN_DIR,max_length=512"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return EOS_ID

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text: the BOS that each document began with in training."""
        return BOS_ID

    def fingerprint(self) -> str:
        """SHA-256 of all that its answers depend on: weights, config, tokenizer and settings."""
        settings = [self.model.config.to_dict(), self.tokenizer.hash, self.max_length, self.rolling, self._seed]
        sha256 = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for name, value in sorted(self.model.state_dict().items()):
            sha256.update(f"{name} {value.dtype}".encode())
            sha256.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return sha256.hexdigest()

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes of the model into its results."""
        return {
            "model_num_parameters": self.model.parameter_count(),
            "model_dtype": str(next(self.model.parameters()).dtype),
            "model_sha": self.fingerprint(),
            "max_length": self.max_length,
            "rolling": self.rolling,
        }

    def set_cache_hook(self, cache_hook) -> None:
        """Takes lm-eval's cache of answers (--use_cache), which does not know whose answers it holds: we write that.

        Raises:
            ValueError: if they are those of another model, or of this one in another setting.
        """
        answers = cache_hook.dbdict
        if answers is not None:
            own = self.fingerprint()
            if not len(answers):
                answers[_FINGERPRINT] = own
            elif answers.get(_FINGERPRINT) != own:
                raise ValueError(
                    f"{answers.filename} holds answers of another model, or of other settings: name another file with "
                    "--use_cache, or delete this one"
                )
        super().set_cache_hook(cache_hook)

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
        """For each request (text,): its log-probability, each token scored once.

        In windows of max_length as lm-eval cuts them: each sees one token before its own, only the last as many as fit.
        With rolling="state" each token sees all that is before it.
        """
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        score = self._score_windows if self.rolling == WINDOWS else self._score_whole
        totals = score(texts, disable_tqdm)
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score_windows(self, texts: list[list[int]], disable_tqdm: bool) -> list[float]:
        windows, owners = [], []
        for owner, tokens in enumerate(texts):
            for window in get_rolling_token_windows(tokens, BOS_ID, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(texts)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        return totals

    def _score_whole(self, texts: list[list[int]], disable_tqdm: bool) -> list[float]:
        scores = score_texts(self.model, texts, BOS_ID, self.max_length, self.batch_size)
        return [score for _, score in sorted(tqdm(scores, "log-likelihood", len(texts), disable=disable_tqdm))]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """The same for requests as (key of the cache or None, tokens of the context, tokens of the continuation)."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        scores = score_continuations(self.model, pairs, self.max_length, self.batch_size)
        answers: list = [None] * len(requests)
        for index, score, greedy in tqdm(scores, "log-likelihood", len(requests), disable=disable_tqdm):
            answers[index] = score, greedy
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
        return answers

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
                for batch in batches(sorted(indices, key=lambda index: -len(prompts[index])), self.batch_size):
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


def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / TOKENIZER_FILE).is_file() and (folder / TOKENIZER_FILES[0]).is_file():
        raise ValueError(
            f"{folder} has a tokenizer of another project: such a model is evaluated through transformers, with "
            f"`ssm-trn lm-eval --model hf --model_args pretrained={folder}`"
        )
    return Tokenizer.load(folder / TOKENIZER_FILE)


def _whole_number(name: str, value: int | str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is '{value}'; it must be a whole number") from error


def _batch_size(value: int | str | None) -> int:
    """lm-eval's command line passes numbers as strings, and "auto" or "auto:4"."""
    if value is None or str(value).startswith("auto"):
        return DEFAULT_BATCH_SIZE
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"batch_size is '{value}'; it must be 'auto' or a number of at least 1")
    return int(value)
