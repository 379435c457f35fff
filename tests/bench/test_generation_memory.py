"""Memory stays constant while a recurrent model generates; that of a transformer grows, so growth would be seen."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ssm_trn.bench import generation_memory
from ssm_trn.bench.generation_memory import SAMPLES
from ssm_trn.config import ModelConfig
from ssm_trn.results import read_results

TOKENS = 400
CONFIGS = {
    "recurrent": ModelConfig(64, 64, ["mamba2", "gated_deltanet"]),
    "transformer": ModelConfig(64, 512, [{"mixer": "attention", "n_heads": 8}] * 3, d_ff=32),
}
BYTES_PER_TOKEN = 3 * (2 * 512 * 4 + 8)  # keys and values of each layer in float32, and the position


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_memory_is_measured_in_fresh_processes_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generation_memory, "model_configs", lambda: CONFIGS)
    generation_memory.main([str(tmp_path), "--tokens", str(TOKENS)])
    results = read_results(tmp_path / "results.json", "memory")
    recurrent, transformer = results["memory"].values()
    for model in (recurrent, transformer):
        assert model["tokens"] == [TOKENS // SAMPLES * sample for sample in range(1, SAMPLES + 1)]
    growth = {name: model["process_bytes"][-1] - model["process_bytes"][3] for name, model in results["memory"].items()}
    assert len(set(recurrent["state_bytes"])) == 1 and growth["recurrent"] < 2**20
    steps = [after - before for before, after in pairwise(transformer["state_bytes"])]
    assert set(steps) == {TOKENS // SAMPLES * BYTES_PER_TOKEN}
    assert growth["transformer"] > 0.8 * 36 / 40 * TOKENS * BYTES_PER_TOKEN > 3 * 2**20

    report = (tmp_path / "report.md").read_text()
    assert generation_memory.table(results) in report and generation_memory.table(results) in capsys.readouterr().out
    assert f"{recurrent['state_bytes'][0] / 2**20:.1f} MiB" in report and "memory.svg" in report
    picture = (tmp_path / "memory.svg").read_bytes()
    (tmp_path / "memory.svg").unlink()
    generation_memory.main([str(tmp_path), "--report"])
    assert (tmp_path / "memory.svg").read_bytes() == picture


def test_the_models_have_one_size_and_only_the_transformer_remembers_more_and_more():
    counts, growths = [], {}
    for name, config in generation_memory.model_configs().items():
        counts.append(config.parameter_count())
        model = generation_memory.LanguageModel.without_memory(config)
        growths[name] = model.state_size(4000) / model.state_size(200)
    assert max(counts) < 1.02 * min(counts)
    assert growths == {"Mamba-2": 1, "hybrid": 1, "transformer": 20}


def test_the_report_in_docs_is_that_of_its_results_and_shows_constant_memory():
    folder = Path(__file__).parents[2] / "docs" / "generation"
    results = read_results(folder / "results.json", "memory")
    assert generation_memory.table(results) in (folder / "report.md").read_text()
    for name in ("Mamba-2", "hybrid"):
        model = results["memory"][name]
        assert model["tokens"][-1] == 4000 and len(set(model["state_bytes"])) == 1
        assert max(model["process_bytes"]) - min(model["process_bytes"]) < 2**20


def test_too_few_tokens_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tokens is 39; it must be at least 40"):
        generation_memory.main([str(tmp_path / "new"), "--tokens", "39"])
    assert not (tmp_path / "new").exists()
