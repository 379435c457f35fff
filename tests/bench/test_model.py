"""`ssm-trn bench model`: figures of models on this device, from the command line to tables and plots."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.bench import hardware, model, model_report
from ssm_trn.bench.hardware import EnergyMeter, Lap, Stopwatch, energy_meter
from ssm_trn.bench.model import Timing, Workload
from ssm_trn.cli import main

CONFIGS = {
    "recurrent": ModelConfig(50, 16, [{"mixer": "mamba2", "head_dim": 16}], tie_embeddings=False),
    "transformer": ModelConfig(60, 16, [{"mixer": "attention", "n_heads": 2}]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A run folder and a YAML file."""
    folder = tmp_path_factory.mktemp("models")
    LanguageModel(CONFIGS["recurrent"]).save_pretrained(folder / "recurrent")
    (folder / "transformer.yaml").write_text(yaml.safe_dump(CONFIGS["transformer"].to_dict()))
    return f"{folder / 'recurrent'},{folder / 'transformer.yaml'}"


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    sizes = ["--block_length", "8", "--batch_size", "2", "--contexts", "[4,16]", "--new_tokens", "2", "--rounds", "2"]
    options = ["--price_per_hour", "2", "--peak_tflops", "0.5", "--output", str(folder)]
    assert main(["bench", "model", models, *sizes, *options]) == 0
    return json.loads((folder / "results.json").read_text()), folder


def test_figures_follow_from_the_times(results):
    results, _ = results
    assert [row["name"] for row in results["models"]] == ["recurrent", "transformer"]
    assert results["device"]["limits"]["flops"] == 5e11 and results["device"]["limits_from"]["bytes"] == "measured"
    for row in results["models"]:
        config, training = CONFIGS[row["name"]], row["training"]
        assert row["parameters"] == config.parameter_count() and len(training["samples"]) == 2
        seconds = sum(training["samples"]) / 2  # of two, the median is the mean
        assert training["tokens_per_second"] == pytest.approx(2 * 8 / seconds)
        flops = 3 * config.flops_per_token(8)
        assert training["flops_utilisation"] == pytest.approx(flops * 2 * 8 / seconds / 5e11)
        assert training["price_per_million_tokens"] == pytest.approx(2 / 3600 * 1e6 * seconds / 16)
        assert training["peak_memory_bytes"] > 4 * 4 * row["parameters"]  # weights, gradients and two moments
        assert [line["context"] for line in row["generation"]] == [4, 16]
        for line in row["generation"]:
            assert line["tokens_per_second"] == pytest.approx(1 / line["seconds_per_token"])
            assert line["seconds_to_first_token"] > 0 and 0 < line["bandwidth_utilisation"] < 1


def test_only_the_transformer_has_a_state_that_grows(results):
    recurrent, transformer = ([line["state_bytes"] for line in row["generation"]] for row in results[0]["models"])
    assert recurrent[0] == recurrent[1]
    assert transformer[1] - transformer[0] >= 12 * 2 * 16 * 4  # keys and values of twelve tokens more, in float32


def test_report_is_made_from_the_results_alone(results):
    results, folder = results
    text = (folder / "report.md").read_text()
    assert model_report.training_table(results) in text and model_report.generation_table(results) in text
    assert all((folder / file).exists() and file in text for file in model_report.PLOTS)
    (folder / "report.md").unlink()
    model_report.main([str(folder / "results.json")])
    assert (folder / "report.md").read_text() == text


def test_columns_of_energy_and_of_compiling_where_they_are_known(results):
    changed = json.loads(json.dumps(results[0]))
    changed["device"]["compiles"] = True
    for row in changed["models"]:
        row["training"]["joules_per_million_tokens"] = 5000.0
        row["training"]["peak_memory_bytes"] = None
    table = model_report.training_table(changed)
    assert "| kJ per million tokens |" in table and "| 5.0 |" in table and "| first step |" in table
    assert "| unknown | unknown |" in table and "kJ" not in model_report.generation_table(changed)
    assert "Energy is all that the processor took" in model_report.notes(changed)


def test_bytes_per_token_are_weights_and_state():
    of = LanguageModel(CONFIGS["transformer"])
    weights, state = 4 * of.parameter_count(), model.state_bytes(of, 16)
    assert model.bytes_per_token(of, 16, 1) == weights + state
    assert model.bytes_per_token(of, 16, 4) == weights / 4 + state
    untied = LanguageModel(CONFIGS["recurrent"])
    looked_up = 4 * untied.embedding.weight.numel()
    expected = 4 * untied.parameter_count() - looked_up + model.state_bytes(untied, 16)
    assert model.bytes_per_token(untied, 16, 1) == expected


def test_timings_are_medians_without_the_first_call():
    timing = Timing.of([Lap(9.0, 9.0), Lap(1.0, 4.0), Lap(3.0, 5.0), Lap(2.0, 6.0)])
    assert (timing.seconds, timing.joules, timing.first_seconds, timing.samples) == (2.0, 5.0, 9.0, [1.0, 3.0, 2.0])
    assert Timing.of([Lap(9.0, None), Lap(1.0, None)]).joules is None


def test_energy_of_a_processor_is_read_from_its_counters(tmp_path):
    for number, start in enumerate((100, 999_999_000)):
        zone = tmp_path / f"intel-rapl:{number}"
        zone.mkdir()
        (zone / "energy_uj").write_text(f"{start}\n")
        (zone / "max_energy_range_uj").write_text("1000000000\n")
    part = tmp_path / "intel-rapl:0:0"  # a core's, which the package counts already
    part.mkdir()
    (part / "energy_uj").write_text("5\n")
    meter = energy_meter(torch.device("cpu"), tmp_path)
    watch = Stopwatch(torch.device("cpu"), meter)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("2000100\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("1999000\n")  # has begun again at 0
    assert watch.lap().joules == pytest.approx(2.0 + 2.0)
    assert energy_meter(torch.device("cpu"), tmp_path / "nowhere") is None


def test_energy_of_a_gpu_is_asked_of_its_driver(monkeypatch):
    energy = iter([1000, 2500, 4000])
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(energy),
        NVMLError=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    meter = energy_meter(torch.device("cuda"))
    assert isinstance(meter, EnergyMeter) and meter.joules(meter.read(), meter.read()) == 1.5
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_meter(torch.device("cuda")) is None


def test_speeds_of_the_device_are_positive(monkeypatch):
    monkeypatch.setitem(hardware._PRODUCT_WIDTH, "cpu", 64)
    monkeypatch.setitem(hardware._COPIED_BYTES, "cpu", 2**16)
    device = torch.device("cpu")
    assert hardware.product_speed(device, torch.float32, 2) > 0 and hardware.copy_speed(device, 2) > 0
    assert hardware.memory_size(device) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.yaml"], "there is no model config nowhere.yaml"),
        (["nowhere"], "nowhere holds no model"),
        (["MODELS,"], "the name of a model is empty"),
        (["BROKEN"], "broken.yaml is not YAML"),
        (["MODELS", "--contexts", "[8, 8]"], "contexts are [8, 8]; give different lengths"),
        (["MODELS", "--block_length", "1"], "block_length is 1"),
        (["MODELS", "--contexts", "[]"], "contexts are []"),
        (["MODELS", "--peak_tflops", "0"], "peak_tflops is 0"),
        (["MODELS", "--price_per_hour", "-1"], "price_per_hour is -1"),
        (["MODELS", "--dtype", "float16"], "float16"),
        (["MODELS,MODELS"], "two models are called"),
    ],
)
def test_wrong_input_is_told_in_one_sentence(models, tmp_path, capsys, words, sentence):
    (tmp_path / "broken.yaml").write_text("d_model: [1")
    words = [word.replace("MODELS", models).replace("BROKEN", str(tmp_path / "broken.yaml")) for word in words]
    assert main(["bench", "model", *words, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_a_workload_checks_itself():
    with pytest.raises(ValueError, match="dtype is half"):
        Workload(dtype="half")
