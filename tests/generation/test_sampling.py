"""Each filter against its definition, and all against transformers' processors."""

import math

import pytest
import torch
from torch.testing import assert_close

from ssm_trn.generation import GREEDY, Sampling
from ssm_trn.generation.sampling import draw, keep_top_k, keep_top_p, penalise

VOCABULARY = 40


def random_logits(rows=6, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)
    logits[1] = logits[1].round()  # with ties
    logits[2, ::3] = -math.inf
    logits[3] = 0
    return logits.to(dtype)


def kept(logits):
    return [{token for token, x in enumerate(row) if x > -math.inf} for row in logits.tolist()]


@pytest.mark.parametrize("k", [1, 2, 7, VOCABULARY, 1000])
def test_top_k_keeps_what_fewer_than_k_are_above(k):
    logits = random_logits()
    rows = logits.tolist()
    expected = [
        {token for token, x in enumerate(row) if sum(other > x for other in row) < k and x > -math.inf} for row in rows
    ]
    result = keep_top_k(logits, k)
    assert kept(result) == expected
    assert all(len(tokens) == min(k, VOCABULARY) for tokens in (kept(result)[0], kept(result)[4]))
    assert torch.equal(result[result > -math.inf], logits[result > -math.inf])


@pytest.mark.parametrize("p", [1e-6, 0.31, 0.91, 0.9991])
def test_top_p_keeps_the_fewest_tokens_that_have_p(p):
    logits = random_logits()
    result = keep_top_p(logits, p)
    for row, tokens in zip(logits.tolist(), kept(result), strict=True):
        probabilities = [math.exp(x - max(row)) for x in row]
        probabilities = [q / math.fsum(probabilities) for q in probabilities]
        ordered = sorted(range(VOCABULARY), key=[-q for q in probabilities].__getitem__)  # of equals the lower id first
        fewest = next(n for n in range(1, VOCABULARY + 1) if math.fsum(probabilities[i] for i in ordered[:n]) >= p)
        assert tokens == set(ordered[:fewest])
    assert torch.equal(result[result > -math.inf], logits[result > -math.inf])


def test_the_penalty_is_that_of_the_paper_on_positive_logits_and_lowers_all():
    logits = random_logits()
    occurred = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    for penalty in (1.2, 0.7):
        result = penalise(logits, occurred, penalty)
        for x, y, seen in zip(logits.flatten().tolist(), result.flatten().tolist(), occurred.flatten(), strict=True):
            if not seen:
                assert y == x
            elif x > 0:
                assert y == pytest.approx(x / penalty)
            else:
                assert y == pytest.approx(x * penalty)
            assert not seen or x in (0, -math.inf) or (y < x) == (penalty > 1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, top_k=5),
        Sampling(1.0, top_p=0.8),
        Sampling(1.0, repetition_penalty=1.3),
        Sampling(1.6, top_k=9, top_p=0.7, repetition_penalty=1.5),  # their order matters
        Sampling(0.4, top_k=30, top_p=0.99, repetition_penalty=0.8),
    ],
)
def test_filters_equal_those_of_transformers(sampling):
    processors = pytest.importorskip("transformers").generation.logits_process
    chain = processors.LogitsProcessorList(
        [
            processors.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
            processors.TemperatureLogitsWarper(float(sampling.temperature)),
            processors.TopKLogitsWarper(sampling.top_k or VOCABULARY),
            processors.TopPLogitsWarper(sampling.top_p),
        ]
    )
    logits = random_logits()[[0, 2, 4, 5]]  # without ties, where top-p may choose either
    prompts = torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(2))
    occurred = sampling.occurred(prompts.tolist(), VOCABULARY)
    assert (occurred is None) == (sampling.repetition_penalty == 1)
    assert_close(sampling.filtered(logits, occurred), chain(prompts, logits.clone()))


def test_draws_have_the_probabilities_of_the_softmax():
    logits, steps = random_logits(), 4000
    uniform = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    for row in logits:
        counts = torch.bincount(draw(row.expand(steps, -1), uniform), minlength=VOCABULARY)
        assert_close(counts.double(), steps * row.softmax(-1), atol=1.0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounding", [0.0, 1e-3])
def test_what_is_impossible_is_never_drawn(dtype, rounding, monkeypatch):
    """At both ends of the range of the random numbers too, and where sums are rounded each in another way.

    So they are in the parallel scans of accelerators: a sum may be smaller than the one before it.
    """
    cumsum, errors = torch.Tensor.cumsum, rounding * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: cumsum(x, dim) + errors)
    extremes = torch.tensor([0.0, 1e-30, 2**-24, 0.5, 1 - 2**-24], dtype=dtype)
    for seed in range(200):
        logits = 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        logits[:7] = logits[20:23] = logits[-7:] = -math.inf
        drawn = draw(logits.expand(5, -1), extremes)
        assert (logits[drawn] > -math.inf).all()
        only = torch.full_like(logits, -math.inf)
        only[seed % VOCABULARY] = -3.0
        assert (draw(only.expand(5, -1), extremes) == seed % VOCABULARY).all()


def test_no_temperature_means_the_likeliest_token():
    logits = random_logits()
    likeliest = logits.argmax(-1)
    assert torch.equal(GREEDY.choose(logits), likeliest)
    assert torch.equal(Sampling(0.0, top_k=3, top_p=0.5).choose(logits), likeliest)
    uniform = torch.rand(len(logits), generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(1e-6), Sampling(5.0, top_k=1), Sampling(5.0, top_p=1e-9), Sampling(5.0, top_p=1e-300)):
        for dtype in (torch.float32, torch.float64):
            chosen = sampling.choose(logits[[0, 2, 4]].to(dtype), uniform=uniform[[0, 2, 4]])
            assert torch.equal(chosen, likeliest[[0, 2, 4]])
    occurred = torch.nn.functional.one_hot(likeliest, VOCABULARY).bool()
    penalised = Sampling(repetition_penalty=1e6).choose(logits[[0, 4]], occurred[[0, 4]])
    assert not (penalised == likeliest[[0, 4]]).any()


def test_what_a_choice_needs_is_told():
    with pytest.raises(ValueError, match="temperature above 0 needs a random number for each row"):
        Sampling(0.5).choose(random_logits())
    for sampling in (Sampling(repetition_penalty=1.2), Sampling(0.5, repetition_penalty=1.2)):
        with pytest.raises(ValueError, match="repetition penalty needs the tokens that each row has"):
            sampling.choose(random_logits(), uniform=torch.zeros(6))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5; it must be 0 .the likeliest token. or at least 1e-06"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1', which should be of type float"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_k": 1.5}, "top_k is 1.5, which should be of type"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01; it must be above 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be at least 1e-06 and at most 1000000"),
        ({"repetition_penalty": 1e300}, "repetition_penalty is 1e.300; it must be at least 1e-06"),
    ],
)
def test_wrong_values_are_told_in_one_sentence(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
