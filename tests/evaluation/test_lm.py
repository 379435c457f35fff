import random
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model

from ssm_trn.data.tokenizer import BOS_ID, EOS_ID
from ssm_trn.evaluation.lm import HarnessModel
from tests.evaluation.models import BigramModel, tiny_model

MAX_LENGTH = 40
TEXT = "the nation of peace must work, naïve 中国 🙂 free\nstate; (1945) people's  and"


def requests(arguments) -> list:
    """What lm-eval passes: objects with `args`."""
    return [SimpleNamespace(args=tuple(args)) for args in arguments]


def text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(TEXT.split(" "), k=words))


def random_requests(tokenizer) -> list[tuple[str, str]]:
    """Pairs of context and continuation of all kinds of difficulty."""
    generator = random.Random(0)
    pairs = []
    for _ in range(3):
        context, shared = text(generator, 5), text(generator, 9)
        pairs += [
            (context, " " + text(generator, 1)),
            (context, " " + text(generator, 6)),
            (context + " ", text(generator, 3)),  # the space belongs to the continuation
            (context + "\n\n", text(generator, 2)),
            ("", text(generator, 4)),
            (" \n", text(generator, 2)),
            (text(generator, 20), " " + text(generator, 3)),  # loses its beginning
            (context, " " + text(generator, 20)),  # longer than max_length by itself
            *((shared, " " + text(generator, words)) for words in (1, 2, 2, 5)),
            ("Größe 中", "国 🙂🙂"),
        ]
    whole = "the nation and the people"
    pairs += [(whole[:cut], whole[cut : cut + size]) for cut in range(1, 24, 2) for size in (1, 9)]  # within words
    return pairs


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
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], abs=tolerance, rel=1e-6)


def test_loglikelihood_is_that_of_one_token_after_another(model, tokenizer):
    pairs = random_requests(tokenizer)
    encoded = [split(tokenizer, *pair) for pair in pairs]
    assert any(len(context) > MAX_LENGTH for context, _ in encoded)
    assert any(len(continuation) > MAX_LENGTH for _, continuation in encoded)
    assert any(len(tokenizer.encode(a + b)) <= len(tokenizer.encode(a)) for a, b in pairs)  # merged into the context
    expected = [one_by_one(model, *pair) for pair in encoded]
    for batch_size in (1, 3, 64):
        lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=MAX_LENGTH)
        order = random.Random(batch_size).sample(range(len(pairs)), len(pairs))
        close(score(lm, [pairs[i] for i in order]), [expected[i] for i in order])


def test_loglikelihood_is_exact_in_float64(tokenizer):
    """Masks and shared states change nothing but rounding."""
    model = tiny_model("hybrid", tokenizer.vocab_size).double()
    pairs = random_requests(tokenizer)[:14]
    lm = HarnessModel(model, tokenizer, batch_size=5, max_length=MAX_LENGTH)
    expected = [one_by_one(model, *split(tokenizer, *pair)) for pair in pairs]
    close(score(lm, pairs), expected, 1e-10)


def test_rolling_scores_each_token_once_in_windows(model, tokenizer):
    generator = random.Random(2)
    documents = ["", "a", *(text(generator, words) for words in (3, 12, 40))]
    expected = []
    for document in documents:
        tokens = [BOS_ID, *tokenizer.encode(document)]
        starts = range(0, len(tokens) - 1, MAX_LENGTH)
        # As in lm-eval, a window sees one token before it, but the last one as many as fit.
        windows = [(start if start != starts[-1] else max(len(tokens) - 1 - MAX_LENGTH, 0), start) for start in starts]
        scores = [one_by_one(model, tokens[a : b + 1], tokens[b + 1 : b + 1 + MAX_LENGTH])[0] for a, b in windows]
        expected.append(sum(scores))
    assert len(tokenizer.encode(documents[-1])) > 2 * MAX_LENGTH
    for batch_size in (1, 4):
        lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=MAX_LENGTH)
        assert lm.loglikelihood_rolling(requests([d] for d in documents), disable_tqdm=True) == pytest.approx(
            expected, abs=1e-5, rel=1e-6
        )


def test_shared_context_is_read_once(model, tokenizer, monkeypatch):
    read = []
    features = model.features

    def counting(tokens, state=None, mask=None, reset=None):
        read.append(tokens.numel() if mask is None else int(mask.sum()))
        return features(tokens, state, mask, reset)

    monkeypatch.setattr(model, "features", counting)
    context, choices = "the nation must work for peace and", [" treaty", " state", " free people of the world", " law"]
    score(HarnessModel(model, tokenizer, max_length=MAX_LENGTH), [(context, choice) for choice in choices])
    pieces = [split(tokenizer, context, choice) for choice in choices]
    assert sum(read) == len(pieces[0][0]) + sum(len(continuation) - 1 for _, continuation in pieces)


def test_uniform_model_and_chain_rule(tokenizer):
    size = tokenizer.vocab_size
    uniform = HarnessModel(BigramModel(torch.zeros(size, size)), tokenizer, max_length=MAX_LENGTH)
    document = "the free people of the nation\n\nwork"
    count = len(tokenizer.encode(document))
    [total] = uniform.loglikelihood_rolling(requests([[document]]), disable_tqdm=True)
    assert total == pytest.approx(-count * torch.tensor(size).log().item())
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    bigram = HarnessModel(BigramModel(table), tokenizer, max_length=MAX_LENGTH)
    first, rest = "the free people", " of the nation\n\nwork"
    scores = score(bigram, [("", document), ("", first), (first, rest)])
    assert scores[0][0] == pytest.approx(scores[1][0] + scores[2][0], abs=1e-4)
    tokens = [BOS_ID, *tokenizer.encode(document)]
    assert scores[0][0] == pytest.approx(table.log_softmax(1)[tokens[:-1], tokens[1:]].sum().item(), abs=1e-4)


def planted(tokenizer, target: str, end: int = EOS_ID) -> BigramModel:
    """A model whose likeliest path from BOS is `target`, then `end`; the tokens of the target must be distinct."""
    path = [BOS_ID, *tokenizer.encode(target), end]
    assert len(set(path[:-1])) == len(path) - 1
    table = torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size)
    table[path[:-1], path[1:]] = 5.0
    return BigramModel(table)


def test_greedy_means_every_token_of_the_continuation(tokenizer):
    target = "free nation must work"
    lm = HarnessModel(planted(tokenizer, target), tokenizer, max_length=MAX_LENGTH)
    cases = {
        ("", target): True,
        ("free", " nation must work"): True,
        ("free nation", " must law"): False,  # wrong at the end
        ("", "law nation must work"): False,  # wrong at the start
        ("free", " nation nation work"): False,  # wrong in the middle
    }
    assert [greedy for _, greedy in score(lm, cases)] == list(cases.values())
    assert lm.generate_until(requests([("", {"max_gen_toks": 30})]), disable_tqdm=True) == [target]


@torch.inference_mode()
def greedy_by_hand(model, tokenizer, context: str, count: int) -> str:
    tokens = [BOS_ID, *tokenizer.encode(context)][-(MAX_LENGTH - count) :]
    generated = []
    while len(generated) < count and EOS_ID not in generated:
        generated.append(model(torch.tensor([tokens + generated]))[0][0, -1].argmax().item())
    return tokenizer.decode(generated)


def test_generation_is_that_of_full_passes(model, tokenizer):
    generator = random.Random(3)
    contexts = ["", "a", *(text(generator, words) for words in (2, 5, 9, 40))]
    expected = [greedy_by_hand(model, tokenizer, context, 12) for context in contexts]
    for batch_size in (1, 4, 16):
        lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=MAX_LENGTH)
        options = {"until": [], "max_gen_toks": 12}
        assert lm.generate_until(requests((c, options) for c in contexts), disable_tqdm=True) == expected


def test_generation_stops_where_it_is_told(tokenizer):
    loop = planted(tokenizer, "free nation must work", end=tokenizer.encode("free")[0])
    lm = HarnessModel(loop, tokenizer, max_length=MAX_LENGTH)
    whole = "free nation must work"
    cases = {
        ("", ("must",)): "free nation ",
        ("", ("work", "st w")): "free nation mu",  # the first in the text, across tokens
        ("free nation", ("k",)): " must wor",
    }
    asked = [(context, {"until": list(until), "max_gen_toks": 15}) for context, until in cases]
    assert lm.generate_until(requests(asked), disable_tqdm=True) == list(cases.values())
    [text] = lm.generate_until(requests([("", {"until": "peace", "max_gen_toks": 6})]), disable_tqdm=True)
    assert text == tokenizer.decode((tokenizer.encode(whole) * 4)[:6])


def test_sampling_is_seeded_and_follows_the_temperature(tokenizer):
    size = tokenizer.vocab_size
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(0))

    def sample(seed, **options):
        lm = HarnessModel(BigramModel(table), tokenizer, max_length=MAX_LENGTH, seed=seed)
        return lm.generate_until(requests([("a", {"max_gen_toks": 20, **options})]), disable_tqdm=True)

    assert sample(0, temperature=1.0) == sample(0, do_sample=True) != sample(1, temperature=1.0)
    assert sample(0, temperature=1e-3) == sample(1, temperature=1e-3) == sample(0) == sample(1, do_sample=False)
    assert sample(0, temperature=9.0, top_k=1) == sample(1, temperature=9.0, top_p=1e-3) == sample(0)
    assert sample(0, temperature=9.0, top_k=0, top_p=1.0) == sample(0, temperature=9.0) != sample(0)
    assert sample(0, temperature=1.0, repetition_penalty=9.0) != sample(0, temperature=1.0)


def test_samples_do_not_depend_on_the_batch(tokenizer):
    size = tokenizer.vocab_size
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    asked = [(context, {"max_gen_toks": 12, "temperature": 1.0}) for context in ("a", "a", "the nation", "", "a")]

    def sample(batch_size):
        lm = HarnessModel(BigramModel(table), tokenizer, batch_size=batch_size, max_length=MAX_LENGTH)
        return lm.generate_until(requests(asked), disable_tqdm=True)

    assert sample(1) == sample(2) == sample(5) and len(set(sample(1))) == 5


def test_lm_eval_makes_it_from_a_run_folder(tokenizer, tmp_path):
    model = tiny_model("recurrent", tokenizer.vocab_size)
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.model")
    extra = {"batch_size": "4", "max_batch_size": None, "device": "cuda:0"}  # as lm-eval's command line adds them
    lm = get_model("ssm_trn").create_from_arg_string(f"pretrained={tmp_path},max_length={MAX_LENGTH}", extra)
    assert (lm.batch_size, lm.max_length) == (4, MAX_LENGTH)
    assert lm.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    pairs = [("the free", " nation"), ("", "peace")]
    close(score(lm, pairs), [one_by_one(model, *split(tokenizer, *pair)) for pair in pairs])
    with pytest.raises(ValueError, match="no argument 'dtype': it takes pretrained"):
        get_model("ssm_trn").create_from_arg_string(f"pretrained={tmp_path},dtype=float16", extra)


def test_answers_reach_the_cache_of_lm_eval(tokenizer, tmp_path):
    lm = HarnessModel(planted(tokenizer, "free nation must work"), tokenizer, max_length=MAX_LENGTH)
    kinds = {
        "loglikelihood": [("free", " nation"), ("", "law")],
        "loglikelihood_rolling": [("free nation",), ("law",)],
        "generate_until": [("free", {"max_gen_toks": 3, "until": []})],
    }
    cache = CachingLM(lm, str(tmp_path / "cache.db"))
    answers = {kind: getattr(lm, kind)(requests(args), disable_tqdm=True) for kind, args in kinds.items()}
    assert len(cache.dbdict) == sum(map(len, kinds.values()))
    lm.model = None  # from here on only the cache can answer
    for kind, args in kinds.items():
        assert getattr(cache, kind)(requests(args)) == answers[kind]


def test_wrong_input_is_told_in_a_sentence(tokenizer, tmp_path):
    model = BigramModel(torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size))
    with pytest.raises(FileNotFoundError, match="holds no model"):
        HarnessModel(tmp_path)
    with pytest.raises(ValueError, match="comes without a tokenizer"):
        HarnessModel(model)
    with pytest.raises(ValueError, match="they are not of one run"):
        HarnessModel(BigramModel(torch.zeros(9, 9)), tokenizer)
    for value in ("many", 0, "-1"):
        with pytest.raises(ValueError, match="batch_size is"):
            HarnessModel(model, tokenizer, batch_size=value)
    for device, message in (("gpu", "'gpu' names no device"), ("meta", "there is no device 'meta' on this machine")):
        with pytest.raises(ValueError, match=message):
            HarnessModel(model, tokenizer, max_length=MAX_LENGTH, device=device)
    with pytest.raises(ValueError, match="max_length is 1"):
        HarnessModel(model, tokenizer, max_length=1)
    lm = HarnessModel(model, tokenizer, batch_size="auto", max_length=MAX_LENGTH)
    with pytest.raises(ValueError, match="empty continuation"):
        score(lm, [("free", "")])
    with pytest.raises(ValueError, match="leaves no room"):
        lm.generate_until(requests([("free", {"max_gen_toks": MAX_LENGTH})]), disable_tqdm=True)
    with pytest.raises(ValueError, match="knows no num_beams"):
        lm.generate_until(requests([("free", {"num_beams": 4})]), disable_tqdm=True)
    with pytest.raises(ValueError, match="top_p is 2"):
        lm.generate_until(requests([("free", {"do_sample": True, "top_p": 2})]), disable_tqdm=True)
