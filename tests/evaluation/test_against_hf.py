"""The same weights through lm-eval's own model class for transformers and through ours: every answer must agree."""

import random

import pytest
import torch
from lm_eval.api.instance import Instance
from torch import nn

from ssm_trn import ModelConfig
from ssm_trn.evaluation.lm import HarnessModel
from tests.evaluation.requests import MAX_LENGTH, random_requests, text

transformers = pytest.importorskip("transformers")


class LlamaOfTransformers(nn.Module):
    """A Llama of transformers in the place of a LanguageModel; its state is all that it has read."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = ModelConfig(model.config.vocab_size, d_model=8, layers=["attention"])

    def init_state(self, batch, max_length, device=None, dtype=None):
        return torch.zeros(batch, 0, dtype=torch.int64), torch.zeros(batch, 0, dtype=torch.bool)

    def features(self, tokens, state=None, mask=None, reset=None):
        new = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        tokens, mask = torch.cat([state[0], tokens], 1), torch.cat([state[1], new], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model.model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions, use_cache=False)
        return out.last_hidden_state[:, -new.shape[1] :], (tokens, mask)

    def logits(self, features):
        return self.model.lm_head(features)


@pytest.fixture(scope="module")
def pair(tokenizer, data):
    """lm-eval's model and ours."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    settings = {"legacy": False, "add_prefix_space": False, "add_bos_token": True}
    theirs = transformers.LlamaTokenizer.from_pretrained(data, **settings)
    llama.lm_head.weight.data[4:260] = 0  # so no byte is generated: of half a character the two make different texts
    # Without its cache, which mixes up requests that have the same tokens but another split.
    hf = HFLM(llama, "causal", tokenizer=theirs, batch_size=4, max_length=MAX_LENGTH, device="cpu", logits_cache=False)
    return hf, HarnessModel(LlamaOfTransformers(llama), tokenizer, batch_size=5, max_length=MAX_LENGTH, device="cpu")


def instances(kind: str, arguments) -> list[Instance]:
    return [Instance(kind, {}, tuple(args), 0, metadata=("task", 0, 1)) for args in arguments]


def test_loglikelihood(pair, tokenizer):
    hf, ours = pair
    pairs = [
        (context, continuation)
        for kind in random_requests().values()
        for context, continuation in kind
        # On the others theirs stops with an assertion: longer than max_length, or merged into the context.
        if len(tokenizer.encode(continuation)) < MAX_LENGTH
        and len(tokenizer.encode(context + continuation)) > len(tokenizer.encode(context.rstrip()))
    ]
    assert len(pairs) > 50
    asked = instances("loglikelihood", pairs)
    expected, scores = hf.loglikelihood(asked, disable_tqdm=True), ours.loglikelihood(asked, disable_tqdm=True)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], rel=1e-5, abs=1e-5)


def test_rolling(pair, monkeypatch):
    monkeypatch.setattr(pair[0], "add_bos_token", False)  # else theirs scores a second BOS as part of the text
    generator = random.Random(4)
    asked = instances("loglikelihood_rolling", ([text(generator, words)] for words in (1, 7, 30, 90)))
    expected = pair[0].loglikelihood_rolling(asked, disable_tqdm=True)
    assert pair[1].loglikelihood_rolling(asked, disable_tqdm=True) == pytest.approx(expected, rel=1e-5)


def test_generation(pair):
    generator = random.Random(5)
    options = {"until": [".", "the"], "max_gen_toks": 12, "do_sample": False}
    asked = instances("generate_until", ([text(generator, words), options] for words in (1, 5, 30, 5, 12)))
    expected = pair[0].generate_until(asked, disable_tqdm=True)
    assert pair[1].generate_until(asked, disable_tqdm=True) == expected
