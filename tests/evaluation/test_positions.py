"""Loss by position against the plain sum over single tokens."""

import numpy as np
import pytest
import torch

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.data import TokenFile
from ssm_trn.evaluation.positions import _powers_of_two, loss_by_position


@pytest.fixture(scope="module")
def model(data):
    torch.manual_seed(0)
    vocabulary = TokenFile.open(data, "validation").tokenizer.vocab_size
    return LanguageModel(ModelConfig(vocabulary, 16, ["linear_attention"]))


def test_groups_are_means_over_windows_within_documents(data, model):
    length, file = 12, TokenFile.open(data, "validation")
    nats, counts = np.zeros(length), np.zeros(length)
    for index in range(file.documents):
        document = file.document(index).astype(np.int64)
        for start in range(0, len(document) - length, length):
            window = torch.from_numpy(document[start : start + length + 1])
            logits, _ = model(window[None, :-1])
            losses = -logits[0].log_softmax(-1)[torch.arange(length), window[1:]].detach().numpy()
            text = file.tokenizer.piece_bytes[window[1:]] > 0
            nats, counts = nats + losses * text, counts + text
    found = loss_by_position(model, data, length, batch_size=3)
    assert found["positions"] == [1, 2, 4, 8, 12]
    for (first, last), mean, tokens in zip(
        [(0, 1), (1, 2), (2, 4), (4, 8), (8, 12)], found["nats"], found["tokens"], strict=True
    ):
        assert tokens == counts[first:last].sum()
        assert mean == pytest.approx(nats[first:last].sum() / tokens, rel=1e-5)


def test_fewer_tokens_are_taken_evenly(data, model):
    every = loss_by_position(model, data, 8)["tokens"]
    some = loss_by_position(model, data, 8, max_tokens=64)["tokens"]
    assert 0 < sum(some) <= 64 < sum(every)


def test_documents_that_are_all_shorter_tell_nothing(data, model):
    assert loss_by_position(model, data, 10**6) is None


def test_groups_end_at_powers_of_two_and_at_the_length():
    assert _powers_of_two(1).tolist() == [0, 1]
    assert _powers_of_two(8).tolist() == [0, 1, 2, 4, 8]
    assert _powers_of_two(9).tolist() == [0, 1, 2, 4, 8, 9]
