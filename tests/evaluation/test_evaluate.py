import json
import math
from types import SimpleNamespace

import pytest
import yaml
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from ssm_trn.data.token_file import TokenFile
from ssm_trn.evaluation.evaluate import evaluate
from ssm_trn.evaluation.lm import HarnessModel
from ssm_trn.evaluation.scoring import BlockScores, bits_per_byte, paired_bootstrap
from tests.evaluation.models import tiny_model
from tests.evaluation.samples import SAMPLES


@pytest.fixture
def run(data, tokenizer, tmp_path):
    """A run folder as training leaves it."""
    tiny_model("hybrid", tokenizer.vocab_size).save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.model")
    settings = {"class_path": "ssm_trn.data.TokenDataModule", "init_args": {"folder": data, "block_length": 64}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    return tmp_path


def test_default_tasks_need_nothing_but_the_run(run, data, capsys):
    result = evaluate(str(run), limit=20)
    assert json.loads((run / "evaluation.json").read_text()) == result
    assert not list(run.glob(".*unfinished"))
    assert (result["format_version"], result["max_length"], result["lm_eval"]) == (1, 64, "0.4.13")
    estimate = result["bits_per_byte"]
    assert estimate["low"] < estimate["value"] < estimate["high"]
    blocks = BlockScores.from_dict(estimate["blocks"])
    assert blocks.bytes.sum() == TokenFile.open(data, "validation").text_bytes
    assert bits_per_byte(blocks).value == estimate["value"]
    assert paired_bootstrap(blocks, blocks).value == 0
    for name, metric in {"true_ending": "acc_mutual_info", "word_order": "acc"}.items():
        task = result["tasks"][name]
        assert (task["items"], task["version"], list(task["metrics"])) == (20, 1.0, [metric])
        score = task["metrics"][metric]
        assert score["stderr"] == pytest.approx(math.sqrt(score["value"] * (1 - score["value"]) / 19))
    printed = capsys.readouterr().out
    assert f"{estimate['value']:.4f}" in printed
    assert "word_order" in printed


def test_official_tasks_of_every_kind_run(run, benchmarks, capsys):
    names = ["lambada_openai", "wikitext", "winogrande", "arc_easy", "copa", "blimp"]
    result = evaluate(str(run), names, benchmarks=benchmarks, limit=2)
    assert "bits_per_byte" not in result
    assert len(result["tasks"]) == 5 + 68
    assert set(result["tasks"]["lambada_openai"]["metrics"]) == {"acc", "perplexity"}
    assert set(result["tasks"]["wikitext"]["metrics"]) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert result["tasks"]["wikitext"]["metrics"]["bits_per_byte"]["stderr"] is None
    assert result["tasks"]["blimp_wh_island"]["group"] == "blimp"
    printed = capsys.readouterr().out
    assert "blimp" in printed
    assert "blimp_wh_island" not in printed

    page, lm = SAMPLES["wikitext2_raw/test"], HarnessModel(run)
    # lm-eval scores the page without the marks of its tokenization, and divides by the bytes of the page as it is.
    [nats] = lm.loglikelihood_rolling([SimpleNamespace(args=(wikitext_detokenizer(page),))])
    score = result["tasks"]["wikitext"]["metrics"]["bits_per_byte"]["value"]
    assert score == pytest.approx(-nats / math.log(2) / len(page["page"].encode()), rel=1e-5)


def test_results_of_other_tasks_stay_while_the_model_is_the_same(run, tokenizer, capsys):
    first = evaluate(str(run), "bits_per_byte,word_order", limit=5)
    capsys.readouterr()
    second = evaluate(str(run), "true_ending", limit=5)
    assert "word_order" not in capsys.readouterr().out  # only what is new is printed
    assert list(second["tasks"]) == ["word_order", "true_ending"]
    assert second["bits_per_byte"] == first["bits_per_byte"]
    assert list(evaluate(str(run), "true_ending", limit=5, max_length=32)["tasks"]) == ["true_ending"]
    tiny_model("hybrid", tokenizer.vocab_size, seed=1).save_pretrained(run)
    assert list(evaluate(str(run), "word_order", limit=5, max_length=32)["tasks"]) == ["word_order"]


def test_batch_size_changes_nothing(run, benchmarks):
    names = "bits_per_byte,true_ending,word_order,winogrande,wikitext"
    settings = {"benchmarks": benchmarks, "limit": 8}
    first = evaluate(str(run), names, batch_size=1, output=str(run / "one.json"), **settings)
    other = evaluate(str(run), names, batch_size=7, output=str(run / "seven.json"), **settings)
    assert not (run / "evaluation.json").exists()
    assert first["bits_per_byte"]["value"] == pytest.approx(other["bits_per_byte"]["value"], rel=1e-6)
    for name, task in first["tasks"].items():
        for metric, score in task["metrics"].items():
            assert score["value"] == pytest.approx(other["tasks"][name]["metrics"][metric]["value"], rel=1e-5)


def test_wrong_input_is_told_in_a_sentence_and_leaves_nothing(run, data, tmp_path, monkeypatch):
    monkeypatch.delenv("SSM_TRN_BENCHMARKS", raising=False)
    with pytest.raises(ValueError, match="unknown task 'none_such'"):
        evaluate(str(run), "word_order,none_such")
    with pytest.raises(ValueError, match="needs its data file"):
        evaluate(str(run), "piqa")
    with pytest.raises(ValueError, match="limit is 0"):
        evaluate(str(run), limit=0)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        evaluate(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="no prepared data"):
        evaluate(str(run), data=str(tmp_path / "nothing"))
    assert not (run / "evaluation.json").exists()
    with pytest.raises(ValueError, match="is not a file: name another one with --output"):
        evaluate(str(run), "word_order", output=str(tmp_path))
    with pytest.raises(FileExistsError):  # before an evaluation is made that has no place
        evaluate(str(run), "word_order", output=str(run / "config.yaml" / "evaluation.json"))
    for content in ("a: [", "- a", "", "data: [1]"):
        (run / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match="config.yaml is not the configuration of a run"):
            evaluate(str(run))
    (run / "config.yaml").unlink()
    with pytest.raises(ValueError, match="give max_length"):
        evaluate(str(run))
    for name in ("bits_per_byte", "word_order"):
        with pytest.raises(ValueError, match="held-out text.*--data"):
            evaluate(str(run), name, max_length=16)
    (run / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a file of this command"):
        evaluate(str(run), "word_order", data=data, max_length=16, output=str(run / "other.json"))
    assert (run / "other.json").read_text() == "[1]"
