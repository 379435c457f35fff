"""Scores with shared contexts, in batches, against one token after another."""

import random

import pytest
import torch

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.data.tokenizer import BOS_ID
from ssm_trn.evaluation import likelihoods
from ssm_trn.evaluation.lm import HarnessModel
from ssm_trn.generation import generate
from tests.evaluation.models import LAYERS, tiny_model
from tests.evaluation.requests import MAX_LENGTH, close, one_by_one, random_requests, requests, score, split, text


@pytest.fixture
def tokens_read(model, monkeypatch) -> list[int]:
    """How many real tokens the model read in each of its passes."""
    read, features = [], model.features

    def counting(tokens, state=None, mask=None, reset=None):
        read.append(tokens.numel() if mask is None else int(mask.sum()))
        return features(tokens, state, mask, reset)

    monkeypatch.setattr(model, "features", counting)
    return read


def test_loglikelihood_is_that_of_one_token_after_another(model, tokenizer, monkeypatch):
    kinds = random_requests()
    pairs = [pair for kind in kinds.values() for pair in kind]
    encoded = [split(tokenizer, *pair) for pair in pairs]
    assert len(pairs) >= 200 and len(kinds) >= 10
    assert all(len(context) > MAX_LENGTH for context, _ in encoded[slice(*_place(kinds, "context beyond the maximum"))])
    long = encoded[slice(*_place(kinds, "continuation beyond the maximum"))]
    assert all(len(continuation) > MAX_LENGTH for _, continuation in long)
    assert any(len(tokenizer.encode(a + b)) <= len(tokenizer.encode(a)) for a, b in pairs)  # merged into the context
    expected = [one_by_one(model, *pair) for pair in encoded]
    for batch_size, header in ((1, 64), (3, 64), (64, 64), (3, 6)):
        monkeypatch.setattr(likelihoods, "_HEADER", header)  # tokens in common that are read once for a batch
        lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=MAX_LENGTH)
        order = random.Random(batch_size).sample(range(len(pairs)), len(pairs))
        close(score(lm, [pairs[i] for i in order]), [expected[i] for i in order])


def _place(kinds: dict, name: str) -> tuple[int, int]:
    """Where the requests of a kind stand among all."""
    before = sum(len(kinds[kind]) for kind in list(kinds)[: list(kinds).index(name)])
    return before, before + len(kinds[name])


def test_loglikelihood_is_exact_in_float64(tokenizer):
    """Masks and shared states change nothing but rounding."""
    model = tiny_model("hybrid", tokenizer.vocab_size).double()
    pairs = [pair for kind in random_requests().values() for pair in kind[:1]]
    lm = HarnessModel(model, tokenizer, batch_size=5, max_length=MAX_LENGTH)
    close(score(lm, pairs), [one_by_one(model, *split(tokenizer, *pair)) for pair in pairs], 1e-10)


def test_bfloat16_models_are_scored_alike_in_every_batch(tokenizer):
    for kind in ("recurrent", "hybrid", "transformer"):
        model = tiny_model(kind, tokenizer.vocab_size)
        pairs = [difficulty[0] for difficulty in random_requests().values()]
        exact = [value for value, _ in score(HarnessModel(model, tokenizer, max_length=MAX_LENGTH), pairs)]
        model = model.bfloat16()
        for batch_size in (1, 7):
            lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=MAX_LENGTH)
            rough = [value for value, _ in score(lm, pairs)]
            assert rough != exact and rough == pytest.approx(exact, rel=0.05, abs=0.5)


def test_greedy_is_what_generation_gives(model, tokenizer):
    """The model's own continuation is greedy; with another last or first token it is not."""
    generator = random.Random(6)
    contexts = [[BOS_ID, *tokenizer.encode(text(generator, words))] for words in (1, 3, 5, 9)]
    greedy = generate(model, contexts, 4)
    changed = [[*tokens[:-1], (tokens[-1] + 1) % tokenizer.vocab_size] for tokens in greedy]
    changed += [[(tokens[0] + 1) % tokenizer.vocab_size, *tokens[1:]] for tokens in greedy]
    pairs = list(zip(contexts * 3, greedy + changed, strict=True))
    answers = sorted(likelihoods.score_continuations(model, pairs, MAX_LENGTH, 5))
    assert [is_greedy for _, _, is_greedy in answers] == [True] * 4 + [False] * 8


def test_spare_rows_of_the_vocabulary_have_no_part():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(300, d_model=32, layers=LAYERS["hybrid"], vocab_multiple=64)).eval()
    assert model.embedding.weight.shape[0] == 320
    pairs = [([BOS_ID, 290], [291, 292]), ([BOS_ID, 290], [293])]
    expected = sorted(likelihoods.score_continuations(model, pairs, MAX_LENGTH, 2))
    with torch.no_grad():
        model.embedding.weight[300:] = 100 * model.embedding.weight[:1]
    assert sorted(likelihoods.score_continuations(model, pairs, MAX_LENGTH, 2)) == expected


def test_rolling_scores_each_token_once_in_windows(model, tokenizer):
    documents, encoded = _documents(tokenizer)
    expected = []
    for tokens in encoded:
        starts = range(0, len(tokens) - 1, MAX_LENGTH)
        # As in lm-eval, a window sees one token before it, but the last one as many as fit.
        windows = [(start if start != starts[-1] else max(len(tokens) - 1 - MAX_LENGTH, 0), start) for start in starts]
        scores = [one_by_one(model, tokens[a : b + 1], tokens[b + 1 : b + 1 + MAX_LENGTH])[0] for a, b in windows]
        expected.append(sum(scores))
    for batch_size in (1, 4):
        lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=MAX_LENGTH)
        scores = lm.loglikelihood_rolling(requests([document] for document in documents), disable_tqdm=True)
        assert scores == pytest.approx(expected, abs=1e-5, rel=1e-6)


def test_rolling_with_the_state_is_one_pass_over_the_whole_text(model, tokenizer, request):
    documents, encoded = _documents(tokenizer)
    if "transformer" in request.node.name:
        with pytest.raises(ValueError, match="attention over more than 40 tokens: choose rolling=windows"):
            HarnessModel(model, tokenizer, max_length=MAX_LENGTH, rolling="state")
        return
    expected = []
    for tokens in encoded:
        with torch.no_grad():
            scores = model(torch.tensor([tokens]))[0][0].double().log_softmax(-1)
        expected.append(scores[:-1].gather(1, torch.tensor(tokens)[1:, None]).sum().item())
    for batch_size in (1, 4):
        lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=MAX_LENGTH, rolling="state")
        scores = lm.loglikelihood_rolling(requests([document] for document in documents), disable_tqdm=True)
        assert scores == pytest.approx(expected, abs=1e-5, rel=1e-6)


def _documents(tokenizer) -> tuple[list[str], list[list[int]]]:
    """Texts from an empty one to one of several windows, and their tokens behind BOS."""
    generator = random.Random(2)
    documents = ["", "a", *(text(generator, words) for words in (3, 12, 40))]
    assert len(tokenizer.encode(documents[-1])) > 2 * MAX_LENGTH
    return documents, [[BOS_ID, *tokenizer.encode(document)] for document in documents]


def test_shared_context_is_read_once(model, tokenizer, tokens_read):
    context, choices = "the nation must work for peace and", [" treaty", " state", " free people of the world", " law"]
    score(HarnessModel(model, tokenizer, max_length=MAX_LENGTH), [(context, choice) for choice in choices])
    pieces = [split(tokenizer, context, choice) for choice in choices]
    assert sum(tokens_read) == len(pieces[0][0]) + sum(len(continuation) - 1 for _, continuation in pieces)


def test_what_contexts_begin_with_is_read_once_for_a_batch(model, tokenizer, tokens_read):
    generator = random.Random(7)
    examples = [tokenizer.encode(text(generator, 40)) for _ in range(2)]
    assert min(map(len, examples)) > likelihoods._HEADER
    questions = [tokenizer.encode(" " + text(generator, words)) for words in (1, 9, 5, 3)]
    pairs = [([BOS_ID, *header, *question], [300]) for question in questions for header in examples]
    for _ in likelihoods.score_continuations(model, pairs, 400, 4):
        pass
    once = sum(1 + len(header) for header in examples) + 2 * sum(map(len, questions))
    assert once <= sum(tokens_read) <= once - 2 + 2 * 5  # questions that begin alike may save some more
