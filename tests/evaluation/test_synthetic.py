"""Recall from text: lengths in the model's tokens, and answers that a plain reading of the passage gives."""

import re
from collections import Counter

import pytest

from ssm_trn.data import held_out_documents
from ssm_trn.evaluation import synthetic
from ssm_trn.evaluation.evaluate import quiet
from ssm_trn.evaluation.lm import HarnessModel
from ssm_trn.evaluation.tasks import load_tasks
from tests.evaluation.models import tiny_model

LENGTHS = {"needle": (128, 256, 512), "key_value": (128,)}  # 40 words make no more pairs
CASES = [(kind, length) for kind, lengths in LENGTHS.items() for length in lengths]


def items_of(kind: str, length: int, data: str) -> list[dict]:
    name = f"ssm_{kind}_{length}"
    return [dict(item) for item in load_tasks([name], data=data)["tasks"][name].eval_docs]


@pytest.mark.parametrize(("kind", "length"), CASES)
def test_questions_fill_their_length(kind, length, data, tokenizer):
    items = items_of(kind, length, data)
    assert len(items) == 100
    longest = max(len(tokenizer.encode(f" {choice}")) for item in items for choice in item["choices"])
    line = 2 * longest + 2  # what a word or a pair more may take
    for item in items:
        tokens = [1 + len(tokenizer.encode(f"{item['passage']} {choice}")) for choice in item["choices"]]
        assert length - 2 * longest - line <= max(tokens) <= length
    assert items_of(kind, length, data) == items


@pytest.mark.parametrize(("kind", "length"), CASES)
def test_a_plain_reading_answers_all(kind, length, data):
    items = items_of(kind, length, data)
    for item in items:
        passage, truth = item["passage"], item["choices"][item["label"]]
        assert len(set(item["choices"])) == 4 and all(choice in passage for choice in item["choices"])
        if kind == "needle":
            question = passage[passage.rindex("The secret word of") :]
            assert re.findall(re.escape(question) + r" (\w+)\.", passage) == [truth]
            without = passage.replace(f"{question} {truth}.", "")
            assert all(re.search(rf"\b{choice}\b", without) for choice in item["choices"])
        else:
            pairs = dict(line.split(": ") for line in passage.splitlines()[:-1])
            assert pairs[passage.splitlines()[-1].removesuffix(":")] == truth
            assert {*item["choices"]} <= {*pairs.values()}
    labels = Counter(item["label"] for item in items)
    assert max(labels.values()) < 45  # chance is 25 of 100


@pytest.mark.parametrize(("kind", "length"), CASES)
def test_depths_are_spread(kind, length, data):
    places = []
    for item in items_of(kind, length, data):
        last = item["passage"].splitlines()[-1] if kind == "key_value" else "The secret word of"
        places.append(item["passage"].index(last) / item["passage"].rindex(last))
    assert places[0] == 0 and places[-1] > 0.6
    assert sorted(places) == pytest.approx(places, abs=0.45)  # sentences are few and of unequal length


def test_a_haystack_is_held_out_text(data):
    texts = [" ".join(document.split()) for document in held_out_documents(data)]
    item = items_of("needle", 128, data)[0]
    hay = item["passage"].split(". ", 1)[1].rpartition(" The secret word of")[0]
    assert any(sentence in text for text in texts for sentence in [hay[:40]])


def test_text_and_lengths_that_do_not_fit_are_told(data):
    with pytest.raises(ValueError, match="shorter than a haystack of 99.* tokens: prepare more text"):
        synthetic.needle(100_000, data)
    with pytest.raises(ValueError, match="words are too few for pairs of 4096 tokens"):
        synthetic.key_value(4096, data)
    for task in (synthetic.needle, synthetic.key_value):
        with pytest.raises(ValueError, match="32 tokens are too few .*: choose a longer task"):
            task(32, data)
        with pytest.raises(ValueError, match="made from held-out text.*--data"):
            task(128)


def test_a_model_is_scored(data, tokenizer):
    from lm_eval.evaluator import evaluate

    lm = HarnessModel(tiny_model("recurrent", tokenizer.vocab_size), tokenizer, max_length=128)
    with quiet("lm_eval"):
        results = evaluate(
            lm, load_tasks(["ssm_needle_128", "ssm_key_value_128"], data=data), limit=6, bootstrap_iters=0
        )
    for scores in results["results"].values():
        assert {"acc,none", "acc_mutual_info,none"} <= scores.keys()
        assert scores["sample_len"] == 6
