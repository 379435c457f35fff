"""Requests of all kinds of difficulty, and their scores by the plain way: one token after another."""

import random
from types import SimpleNamespace

import pytest
import torch

from ssm_trn.data.tokenizer import BOS_ID

MAX_LENGTH = 40
TEXT = "the nation of peace must work, naïve 中国 🙂 free\nstate; (1945) people's  and"


def requests(arguments) -> list:
    """What lm-eval passes: objects with `args`."""
    return [SimpleNamespace(args=tuple(args)) for args in arguments]


def text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(TEXT.split(" "), k=words)) or "free"  # one "word" of TEXT is empty


def random_requests(count: int = 18) -> dict[str, list[tuple[str, str]]]:
    """By difficulty, `count` pairs of context and continuation."""
    generator = random.Random(0)

    def some(words: int) -> str:
        return text(generator, generator.randint(1, words))

    def times(make) -> list[tuple[str, str]]:
        return [make() for _ in range(count)]

    sentence = "the nation and the people of the free state"
    cuts = [sorted(generator.sample(range(1, len(sentence)), 2)) for _ in range(count)]
    shared = [text(generator, 9) for _ in range(count // 4)]
    examples = text(generator, 9)
    return {
        "one word": times(lambda: (some(8), " " + text(generator, 1))),
        "several words": times(lambda: (some(8), " " + text(generator, generator.randint(2, 6)))),
        "context ends in a space": times(lambda: (some(8) + " ", some(3))),
        "context ends in lines": times(lambda: (some(8) + "\n\n", some(3))),
        "empty context": times(lambda: ("", some(6))),
        "white space alone": times(lambda: (generator.choice([" ", "\n", " \n"]), some(3))),
        "context beyond the maximum": times(lambda: (text(generator, 40), " " + some(3))),
        "continuation beyond the maximum": times(lambda: (some(4), " " + text(generator, 28)))[:5],
        "shared context": [(context, " " + some(5)) for context in shared for _ in range(4)],
        "contexts that begin alike": times(lambda: (examples + " " + some(4), " " + some(2))),
        "other scripts, cut between characters": times(
            lambda: ("Größe 中"[: generator.randint(1, 7)], "国 🙂" + some(2))
        ),
        "cut within a word": [(sentence[:start], sentence[start:end]) for start, end in cuts],
    }


def split(tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """lm-eval's rule, in other words than the model's."""
    whole = [BOS_ID, *tokenizer.encode(context + continuation)]
    before = [BOS_ID, *tokenizer.encode(context.rstrip())]
    count = max(len(whole) - len(before), 1)
    return (before if len(whole) > len(before) else whole[:-1]), whole[-count:]


@torch.inference_mode()
def one_by_one(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Each token of the continuation by its own forward pass over what is before it, without batch, mask or state."""
    tokens = [*context, *continuation]
    tokens = tokens[-max(MAX_LENGTH + 1, len(continuation) + 1) :]
    total, greedy = 0.0, True
    for position in range(len(tokens) - len(continuation), len(tokens)):
        logits = model(torch.tensor([tokens[:position]]))[0][0, -1].double()
        total += logits.log_softmax(0)[tokens[position]].item()
        greedy &= logits.argmax().item() == tokens[position]
    return total, greedy


def score(lm, pairs) -> list[tuple[float, bool]]:
    return lm.loglikelihood(requests(pairs), disable_tqdm=True)


def close(scores, expected, tolerance=1e-5):
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], abs=tolerance, rel=0)
