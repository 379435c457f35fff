"""Rows of tokens that grow: none depends on its batch, on how its prompt was read, or on the shapes."""

import math
from itertools import accumulate

import pytest
import torch
from torch.testing import assert_close

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.generation import Generation, Sampling, generate, loop
from ssm_trn.state import map_state
from tests.evaluation.models import LAYERS, BigramModel, tiny_model
from tests.mixers.cases import CASES, D_MODEL
from tests.mixers.witnesses import VOCABULARY as WITNESS_VOCABULARY
from tests.mixers.witnesses import WITNESSES

VOCABULARY, NEW = 40, 20
STOP = {7, 11, 31}
SAMPLED = Sampling(0.9, top_k=20, top_p=0.95, repetition_penalty=1.2)
every_kind = pytest.mark.parametrize("kind", LAYERS)


def model_of(kind):
    return tiny_model(kind, VOCABULARY).double()


def prompts_of(*lengths, seed=1, vocab_size=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(6, 1, 33, 2, 17)


@torch.no_grad()
def by_full_passes(model, prompt, count, sampling=None, seed=0, stop=()):
    """Each token by a pass over all before it, without state, mask or batch, and chosen in plain Python."""
    tokens, generator = list(prompt), torch.Generator().manual_seed(seed)
    while len(tokens) < len(prompt) + count and not (len(tokens) > len(prompt) and tokens[-1] in stop):
        logits = model(torch.tensor([tokens]))[0][0, -1]
        if sampling is None:
            tokens.append(logits.argmax().item())
            continue
        chance = torch.rand(1, generator=generator).item()
        seen = torch.tensor([[token in tokens for token in range(len(logits))]])
        probabilities = sampling.filtered(logits[None], seen)[0].softmax(0).tolist()
        tokens.append(next(token for token, reached in enumerate(accumulate(probabilities)) if reached > chance))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sampling", [None, SAMPLED])
@every_kind
def test_a_batch_of_unequal_prompts_equals_each_alone(kind, sampling):
    model = model_of(kind)
    options = {"sampling": sampling or Sampling(), "stop_tokens": STOP}
    together = generate(model, PROMPTS, NEW, seed=5, **options)
    expected = [by_full_passes(model, p, NEW, sampling, 5 + row, STOP) for row, p in enumerate(PROMPTS)]
    assert together == expected
    assert [generate(model, [p], NEW, seed=5 + row, **options)[0] for row, p in enumerate(PROMPTS)] == expected
    order = [3, 0, 4, 1, 2]
    shuffled = generate(model, [PROMPTS[i] for i in order], NEW, seed=[5 + i for i in order], **options)
    assert shuffled == [expected[i] for i in order]
    lengths = {len(tokens) for tokens in expected}
    assert len(lengths) > 1 and min(lengths) < NEW  # some rows ended while others went on


@every_kind
def test_a_batch_equals_each_alone_in_float32(kind):
    model, lengths = tiny_model(kind, VOCABULARY), (5, 1, 60, 11)
    prompts = prompts_of(*lengths, seed=3)
    together = generate(model, prompts, 40)
    assert together == [generate(model, [prompt], 40)[0] for prompt in prompts]


@torch.no_grad()
def test_every_mixer_decodes_padded_rows_and_passes_over_ended_ones():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(VOCABULARY, D_MODEL, list(CASES.values()), d_ff=32)).double()
    prompts = prompts_of(9, 2)
    generation = Generation(model, prompts, 6)
    next(generation)
    generation.stop(1)
    assert len(list(generation)) == 5 and [len(row) for row in generation.tokens] == [6, 1]
    following, state = torch.tensor([[3], [4]]), generation.state
    logits, _ = model(following, state)
    for row, prompt in enumerate(prompts):
        tokens = generation.tokens[row]
        assert tokens == by_full_passes(model, prompt, len(tokens))
        alone, _ = model(torch.tensor([[*prompt, *tokens, following[row].item()]]))
        assert_close(logits[row, -1], alone[0, -1])


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 32, 33])
@every_kind
def test_prompts_read_in_chunks_equal_one_pass(kind, chunk_size):
    model = model_of(kind)
    whole, chunked = (Generation(model, PROMPTS, NEW, chunk_size=size) for size in (1000, chunk_size))
    assert list(chunked) == list(whole)
    following = torch.full((len(PROMPTS), 1), 3)
    with torch.no_grad():
        assert_close(model(following, chunked.state)[0], model(following, whole.state)[0])


@every_kind
def test_a_conversation_goes_on_from_its_state(kind):
    """In unequal pieces of several tokens, where each row has ended somewhere else."""
    model, more = model_of(kind), prompts_of(3, 1, 12, 5, 2, seed=2)
    for state in (None, model.init_state(len(PROMPTS), 200)):  # the first has no room for what follows, and grows
        first = Generation(model, PROMPTS, NEW, stop_tokens=STOP, state=state)
        assert list(first) and len({len(tokens) for tokens in first.tokens}) > 1
        second = generate(model, more, 10, state=first.state)
        for row, tokens in enumerate(second):
            assert tokens == by_full_passes(model, PROMPTS[row] + first.tokens[row] + more[row], 10)


@every_kind
def test_several_tokens_at_once_equal_single_steps(kind):
    model, (prompt, more) = model_of(kind), prompts_of(9, 7)
    state = loop.prefill(model, [prompt], model.init_state(1, 50))[1]
    for token in more[:-1]:
        with torch.no_grad():
            _, state = model(torch.tensor([[token]]), state)
    step_by_step = generate(model, [more[-1:]], 8, state=state)
    at_once = generate(model, [more], 8, state=loop.prefill(model, [prompt], model.init_state(1, 50))[1])
    assert at_once == step_by_step == [by_full_passes(model, prompt + more, 8)]


def test_each_step_gives_the_new_tokens_and_none_for_ended_rows():
    table = torch.zeros(6, 6)
    table[[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]] = 1.0  # the likeliest token is the next number
    generation = Generation(BigramModel(table), [[0], [2], [1, 3]], 4, stop_tokens=[3])
    assert iter(generation) is generation and generation.running == [True] * 3
    assert next(generation) == [1, 3, 4]
    assert generation.running == [True, False, True] and generation.tokens == [[1], [3], [4]]
    assert next(generation) == [2, None, 5]
    generation.stop(2)
    assert list(generation) == [[3, None, None]]
    assert generation.tokens == [[1, 2, 3], [3], [4, 5]] and next(generation, "end") == "end"
    assert len(list(Generation(BigramModel(table), [[0]], 4))) == 4


def test_a_seed_decides_the_draws_and_rows_have_different_ones():
    model, prompts = model_of("recurrent"), [PROMPTS[0]] * 4
    first, again, other = (generate(model, prompts, NEW, sampling=Sampling(1.0), seed=seed) for seed in (0, 0, 1))
    assert first == again and len({tuple(tokens) for tokens in first}) == 4
    assert other[:3] == first[1:]  # the seed of a row is one more than that of the row above
    same = generate(model, prompts, NEW, sampling=Sampling(1.0), seed=[2, 2, 0, 9])
    assert same[0] == same[1] == first[2] and same[2] == first[0]


def recorded(model, monkeypatch):
    """The shapes of all that the model reads, and of the masks."""
    shapes, features = [], model.features

    def record(tokens, state=None, mask=None, reset=None):
        shapes.append((tuple(tokens.shape), None if mask is None else tuple(mask.shape)))
        return features(tokens, state, mask, reset)

    monkeypatch.setattr(model, "features", record)
    return shapes


def test_where_shapes_are_compiled_all_chunks_and_all_steps_have_one(monkeypatch):
    model = model_of("hybrid")
    expected = generate(model, PROMPTS, NEW, stop_tokens=STOP)
    shapes = recorded(model, monkeypatch)
    monkeypatch.setattr(loop, "_ANY_SHAPE", ())
    for count, prompts in ((5, PROMPTS), (5, PROMPTS[::-1]), (1, PROMPTS[2:3])):
        shapes.clear()
        tokens = generate(model, prompts, NEW, stop_tokens=STOP, chunk_size=16)
        assert tokens == [expected[PROMPTS.index(prompt)] for prompt in prompts]
        chunks, step = ((count, 16), (count, 16)), ((count, 1), (count, 1))
        assert set(shapes) == {chunks, step} and shapes[:4] == [*[chunks] * 3, step]


def test_elsewhere_nothing_is_masked_without_need(monkeypatch):
    model = model_of("transformer")
    shapes = recorded(model, monkeypatch)
    generate(model, PROMPTS[:1], 5, chunk_size=4)
    assert shapes == [((1, 4), None), ((1, 2), None), *[((1, 1), None)] * 4]
    shapes.clear()
    generate(model, [[1, 2], [3, 4]], 2)
    assert shapes == [((2, 2), None), ((2, 1), None)]


def state_bytes(state) -> int:
    sizes = []
    map_state(lambda part: sizes.append(part.untyped_storage().nbytes()) or part, state)
    return sum(sizes)


@every_kind
def test_the_state_takes_the_same_memory_at_each_step(kind):
    """That of attention, made in advance for all tokens, too; without room for them it grows with each."""
    model = tiny_model(kind, VOCABULARY)
    sizes = {"made in advance": [], "without room": []}
    for name, state in (("made in advance", None), ("without room", model.init_state(2, 1))):
        generation = Generation(model, prompts_of(1, 1), 60, state=state)
        for step, _ in enumerate(generation):
            if step > 10:  # a window is full after 8 tokens
                sizes[name].append(state_bytes(generation.state))
    assert len(set(sizes["made in advance"])) == 1
    assert (sizes["without room"][-1] > 4 * sizes["without room"][0]) == (kind == "transformer")
    assert len(set(sizes["without room"])) == (49 if kind == "transformer" else 1)


@pytest.mark.parametrize("name", ["attention: Llama", "mamba2: Mamba-2, 1 group"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_generation_equals_that_of_transformers(name, penalty):
    theirs, ours = WITNESSES[name].pair()
    prompts = prompts_of(12, 3, 30, vocab_size=WITNESS_VOCABULARY)
    for rows in ([prompts[0]], prompts):
        tokens, mask = loop.padded(rows, torch.device("cpu"), left=True)
        if penalty != 1 and len(rows) > 1:
            continue  # theirs counts the padding among the tokens that occurred
        found = theirs.generate(
            tokens,
            attention_mask=mask.long(),
            do_sample=False,
            max_new_tokens=64,
            repetition_penalty=penalty,
            pad_token_id=0,
        )
        expected = found[:, tokens.shape[1] :].tolist()
        assert generate(ours, rows, 64, sampling=Sampling(repetition_penalty=penalty)) == expected


def test_wrong_input_is_told_in_one_sentence():
    model = BigramModel(torch.zeros(6, 6))
    cases = [
        (([],), {}, "there is no prompt: give at least one"),
        (([[1], []],), {}, "prompt 2 is empty: begin it with a token"),
        (([[1], [2, 6]],), {}, "prompt 2 has ids from 2 to 6, the model knows 0 to 5"),
        (([[-1]],), {}, "prompt 1 has ids from -1 to -1"),
        (([1, 2],), {}, r"prompts must be rows of token ids, such as \[\[1, 5, 7\], \[1, 9\]\]"),
        ((["text"],), {}, "prompts must be rows of token ids"),
        (([[1]],), {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        (([[1]],), {"chunk_size": 0}, "chunk_size is 0; it must be at least 1"),
        (([[1], [2]],), {"seed": [1]}, "there are 1 seeds for 2 prompts"),
        (([[1], [2]],), {"seed": 2**64 - 1}, f"the seeds go from {2**64 - 1} to {2**64}: choose such as"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            generate(model, *arguments, **{"max_new_tokens": 3, **options})
    with pytest.raises(ValueError, match="the state is one of 2 sequences, the tokens are of 1"):
        model = tiny_model("recurrent", 6)
        generate(model, [[1]], 3, state=model.init_state(2, 9))
    with pytest.raises(ValueError, match="a state for 1000000000000000 tokens does not fit in memory: generate fewer"):
        generate(tiny_model("transformer", 6), [[1]], 10**15 - 1)
    assert generate(BigramModel(torch.eye(6)), torch.tensor([[1, 2]]), 2) == [[2, 2]]  # a tensor is rows too


def test_a_damaged_model_is_told_from_one_that_writes_nothing():
    class NothingAfter3(BigramModel):
        def logits(self, features):
            return super().logits(features).masked_fill(features[..., 3:4] == 1, math.nan)

    model = NothingAfter3(torch.zeros(6, 6))
    generation = Generation(model, [[3], [2]], 2)
    generation.stop(0)  # nothing is asked of that row any more
    assert list(generation) == [[None, 0], [None, 0]]
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(model, [[3], [2]], 2)
    for damage in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="are NaN or inf: its weights are damaged, or its training diverged"):
            generate(BigramModel(torch.full((6, 6), damage)), [[1]], 3, sampling=SAMPLED)
