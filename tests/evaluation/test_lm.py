import random

import pytest
import torch
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model

from ssm_trn.data.tokenizer import BOS_ID, EOS_ID
from ssm_trn.evaluation.lm import HarnessModel
from ssm_trn.interop.command import convert
from tests.evaluation.models import BigramModel, tiny_model
from tests.evaluation.requests import MAX_LENGTH, close, one_by_one, requests, score, split, text


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
    make = get_model("ssm_trn").create_from_arg_string
    assert make(f"pretrained={tmp_path},max_length=9,batch_size=7", extra).batch_size == 7  # what model_args say counts
    for words, message in {
        f"pretrained={tmp_path},max_length=9,dtype=float16": "no argument 'dtype': it takes pretrained",
        "max_length=9": "name it with --model_args pretrained=RUN_DIR",
        f"pretrained={tmp_path},max_length=long": "max_length is 'long'; it must be a whole number",
        f"pretrained={tmp_path},max_length=9,seed=x": "seed is 'x'; it must be a whole number",
        f"pretrained={tmp_path},max_length=9,rolling=cinema": "rolling is 'cinema': choose windows or state",
    }.items():
        with pytest.raises(ValueError, match=message):
            make(words, extra)


def test_converted_models_are_scored_as_before(tokenizer, tmp_path):
    tiny_model("transformer", tokenizer.vocab_size).save_pretrained(tmp_path / "run")
    tokenizer.save(tmp_path / "run" / "tokenizer.model")
    convert(str(tmp_path / "run"), str(tmp_path / "theirs"), format="llama")
    convert(str(tmp_path / "theirs"), str(tmp_path / "back"))
    pairs = [("the free", " nation"), ("", "peace")]
    before, after = (score(HarnessModel(tmp_path / name, max_length=MAX_LENGTH), pairs) for name in ("run", "back"))
    assert after == before
    (tmp_path / "back" / "tokenizer.model").unlink()  # as where the tokenizer is another project's
    with pytest.raises(ValueError, match="tokenizer of another project: .* --model hf --model_args pretrained="):
        HarnessModel(tmp_path / "back", max_length=MAX_LENGTH)


def test_answers_reach_the_cache_of_lm_eval(tokenizer, tmp_path):
    lm = HarnessModel(planted(tokenizer, "free nation must work"), tokenizer, max_length=MAX_LENGTH)
    kinds = {
        "loglikelihood": [("free", " nation"), ("", "law")],
        "loglikelihood_rolling": [("free nation",), ("law",)],
        "generate_until": [("free", {"max_gen_toks": 3, "until": []})],
    }
    cache = CachingLM(lm, str(tmp_path / "cache.db"))
    answers = {kind: getattr(lm, kind)(requests(args), disable_tqdm=True) for kind, args in kinds.items()}
    assert len(cache.dbdict) == 1 + sum(map(len, kinds.values()))  # and whose answers they are
    lm.model = None  # from here on only the cache can answer
    for kind, args in kinds.items():
        assert getattr(cache, kind)(requests(args)) == answers[kind]


def test_answers_of_another_model_are_no_answers_of_this_one(tokenizer, tmp_path):
    path, model = str(tmp_path / "cache.db"), tiny_model("hybrid", tokenizer.vocab_size)
    asked = requests([("free", " nation")])
    cached = CachingLM(HarnessModel(model, tokenizer, max_length=MAX_LENGTH), path).loglikelihood(asked)
    same = HarnessModel(tiny_model("hybrid", tokenizer.vocab_size), tokenizer, batch_size=1, max_length=MAX_LENGTH)
    assert CachingLM(same, path).loglikelihood(asked) == cached
    others = [
        HarnessModel(tiny_model("hybrid", tokenizer.vocab_size, seed=1), tokenizer, max_length=MAX_LENGTH),
        HarnessModel(model, tokenizer, max_length=MAX_LENGTH + 1),
        HarnessModel(model, tokenizer, max_length=MAX_LENGTH, rolling="state"),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"cache.db holds answers of another model.*--use_cache"):
            CachingLM(other, path)
    assert len({other.get_model_info()["model_sha"] for other in [same, *others]}) == 4


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
