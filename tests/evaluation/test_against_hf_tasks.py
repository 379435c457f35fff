"""Whole benchmarks through lm-eval's `hf` model, which runs transformers' own code, and through ours: one answer each.

Our model is saved in transformers' format, so that nothing of ours runs on their side: not the layers, the tokenizer,
the batching, nor the truncation. `make test` takes a few items of each task; 1,005 of blimp, 200 of the others and two
whole pages take some minutes: `pytest -n 0 -s -m slow tests/evaluation/test_against_hf_tasks.py`.
"""

import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from ssm_trn import LanguageModel, ModelConfig, interop
from ssm_trn.evaluation.lm import HarnessModel
from ssm_trn.evaluation.tasks import load_tasks
from ssm_trn.interop.tokenizer import export_tokenizer

pytest.importorskip("transformers")
BENCHMARKS = Path(__file__).parents[2].parent / "shared" / "data" / "benchmarks"
MAX_LENGTH = 432  # some contexts are longer, and no continuation is, which `hf` would refuse
LAYERS = {"llama": ["attention"] * 2, "mamba2": [{"mixer": "mamba2", "feed_forward": "none"}] * 2}
BLIMP = sorted(f"blimp_{path.stem}" for path in BENCHMARKS.glob("blimp/*.jsonl"))
FEW = {**dict.fromkeys(BLIMP[::20], 5), "lambada_openai": 6, "piqa": 6, "arc_easy": 6}
ALL = {**dict.fromkeys(BLIMP, 15), "lambada_openai": 200, "piqa": 200, "arc_easy": 200}
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the folder of whole benchmark files is not here")


@pytest.fixture(scope="module", params=LAYERS)
def pair(request, tokenizer, tmp_path_factory):
    """lm-eval's model for the saved folder, and ours."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(tokenizer.vocab_size, d_model=64, d_ff=64, layers=LAYERS[request.param])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # so that predictions differ from token to token
                parameter.mul_(5)
    folder = tmp_path_factory.mktemp(request.param)
    interop.save(model, folder, request.param)
    export_tokenizer(tokenizer, folder)
    settings = {"batch_size": 16, "max_length": MAX_LENGTH, "device": "cpu"}
    # Without its cache, which mixes up requests that have the same tokens but another split.
    hf = HFLM(str(folder), **settings, logits_cache=False)
    assert type(hf.model).__module__.startswith("transformers.")
    return hf, HarnessModel(model, tokenizer, **settings)


def compare(pair, items: dict[str, int], words: int | None) -> None:
    """All requests of so many items of each task, and of the first words of two pages of wikitext."""
    loaded = load_tasks([*items, "wikitext"], benchmarks=BENCHMARKS)["tasks"]
    wikitext = loaded.pop("wikitext")
    asked = defaultdict(list)
    for name, task in loaded.items():
        task.build_all_requests(limit=items[name])
        asked["blimp" if name in BLIMP else name] += task.instances
    for name, requests in asked.items():
        theirs, ours = (lm.loglikelihood(requests, disable_tqdm=True) for lm in pair)
        differences = [abs(a - b) for (a, _), (b, _) in zip(theirs, ours, strict=True)]
        print(f"{name}: {len(requests)} requests, largest difference {max(differences):.1e}")
        assert max(differences) < 1e-3
        assert [greedy for _, greedy in theirs] == [greedy for _, greedy in ours]
    wikitext.build_all_requests(limit=2)
    for page in wikitext.instances:
        page.arguments = (" ".join(page.args[0].split(" ")[:words]),)
    pair[0].add_bos_token = False  # else theirs scores a second BOS as part of the text
    count = sum(len(page.args[0].split()) for page in wikitext.instances)
    sums = [sum(lm.loglikelihood_rolling(wikitext.instances, disable_tqdm=True)) for lm in pair]
    theirs, ours = (math.exp(-total / count) for total in sums)
    print(f"wikitext: {count} words, word perplexity {ours:.6g}, theirs {theirs:.6g}")
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_few_items(pair):
    compare(pair, FEW, words=200)


@pytest.mark.slow
def test_all_items(pair):
    compare(pair, ALL, words=None)
