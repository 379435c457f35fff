"""How much faster it is to read a context once for its four choices.

    pytest -n 0 -s -m slow tests/evaluation/test_sharing_speed.py

Each way scores the same requests in turn, in one run, on one thread; the figures are ratios of process CPU times.
"""

import random
import time
from statistics import median

import pytest
import torch

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.evaluation.likelihoods import score_continuations

CONTEXT, CHOICES, VOCABULARY = 512, 4, 4096
LAYERS = {
    "transformer": ["attention"] * 4,
    "hybrid": ["gated_deltanet", "gated_deltanet", "gated_deltanet", {"mixer": "attention", "window": 128}],
    "gated_deltanet": ["gated_deltanet"] * 4,
    "mamba2": ["mamba2"] * 4,
}


def questions(count: int) -> list[tuple[list[int], list[int]]]:
    """Contexts of 512 tokens, each with four continuations of 5 to 15."""
    generator = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [generator.randrange(4, VOCABULARY) for _ in range(length)]

    contexts = [tokens(CONTEXT) for _ in range(count)]
    return [(context, tokens(generator.randint(5, 15))) for context in contexts for _ in range(CHOICES)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_four_choices_cost_little_more_than_one(kind):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(VOCABULARY, d_model=256, layers=LAYERS[kind])).eval()
    pairs = questions(4)

    def shared() -> list[float]:
        return [score for _, score, _ in sorted(score_continuations(model, pairs, 1024, 16))]

    def alone() -> list[float]:
        """Each request by its own call, which keeps the context's state for the continuation too."""
        return [score for pair in pairs for _, score, _ in score_continuations(model, [pair], 1024, 1)]

    def in_batches() -> list[float]:
        """No two choices of a question in a call, but as many questions at once."""
        calls = [[score for _, score, _ in sorted(score_continuations(model, pairs[i::4], 1024, 16))] for i in range(4)]
        return [score for question in zip(*calls, strict=True) for score in question]

    @torch.inference_mode()
    def plainly() -> list[float]:
        """One pass of the whole request, without any state."""
        scores = []
        for context, continuation in pairs:
            features, _ = model.features(torch.tensor([[*context, *continuation]])[:, :-1])
            logits = model.logits(features[0, CONTEXT - 1 :]).log_softmax(-1)
            scores.append(logits.gather(1, torch.tensor(continuation)[:, None]).sum().item())
        return scores

    ways, expected = (shared, alone, in_batches, plainly), shared()
    seconds = {way.__name__: [] for way in ways}
    for _ in range(3):
        for way in ways:
            start = time.process_time()
            scores = way()
            seconds[way.__name__].append(time.process_time() - start)
            assert scores == pytest.approx(expected, abs=1e-3)
    times = {name: median(values) for name, values in seconds.items()}
    ratios = {name: value / times["shared"] for name, value in times.items()}
    print(
        f"{kind}, {model.parameter_count():,} parameters: shared {times['shared']:.2f} s of CPU time; as many times as"
    )
    print("    that: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "shared"))
    assert min(ratio for name, ratio in ratios.items() if name != "shared") > 2.5
