"""The command `ssm-trn bench model`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from ssm_trn.bench import model_report
from ssm_trn.bench.hardware import copy_speed, device_name, energy_meter, memory_size, product_speed
from ssm_trn.bench.model import DTYPES, Workload, figures, generation_timings, training_memory, training_timings
from ssm_trn.config import ModelConfig
from ssm_trn.files import read_yaml
from ssm_trn.model import LanguageModel
from ssm_trn.results import FORMAT_VERSION, RESULTS_FILE, machine_facts, write_results
from ssm_trn.runtime import available_device


def model(
    models: str,
    block_length: int = 512,
    batch_size: int = 4,
    contexts: list[int] = [128, 512, 2048],  # noqa: B006  (never changed, and a list is what the help can show)
    new_tokens: int = 32,
    sequences: int = 1,
    rounds: int = 5,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str | None = None,
    peak_tflops: float | None = None,
    peak_gigabytes_per_second: float | None = None,
    price_per_hour: float | None = None,
    output: str = "runs/bench_model",
) -> dict[str, Any]:
    """What models cost on this device: training, the first token, decoding over context, memory, energy and price.

    Args:
        models: Run folders, or YAML files of model configs (random weights then), separated by commas.
        block_length: Time steps of a training block.
        batch_size: Blocks of a training step.
        contexts: Lengths of the prompts behind which tokens are decoded.
        new_tokens: How many are decoded.
        sequences: Prompts at once.
        rounds: How often each is timed.
        dtype: Of weights and activations.
        device: Such as cpu, cuda:0 or xla; by default a GPU where there is one.
        peak_tflops: What the device's sheet says, for the share of it that training reaches; by default the speed of
            large matrix products measured here.
        peak_gigabytes_per_second: The same for memory; by default the speed of a large copy measured here.
        price_per_hour: Of this machine, in any currency: adds the price of a million tokens.
        output: Folder of results.json, report.md and plots.

    Returns:
        What results.json holds.
    """
    workload = Workload(block_length, batch_size, tuple(contexts), new_tokens, sequences, rounds, dtype)
    for name, value in (("peak_tflops", peak_tflops), ("peak_gigabytes_per_second", peak_gigabytes_per_second)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    if price_per_hour is not None and not price_per_hour >= 0:
        raise ValueError(f"price_per_hour is {price_per_hour}; it must be at least 0")
    place = available_device(device)
    torch.manual_seed(0)
    loaded = {name: of.to(place, DTYPES[dtype]) for name, of in _load(models).items()}
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)  # now, so that no figure is lost for want of a place
    given = {
        "flops": peak_tflops and peak_tflops * 1e12,
        "bytes": peak_gigabytes_per_second and peak_gigabytes_per_second * 1e9,
    }
    print(f"{device_name(place, machine_facts()['processor'])} ...", flush=True)
    limits = {
        "flops": given["flops"] or product_speed(place, DTYPES[dtype]),
        "bytes": given["bytes"] or copy_speed(place),
    }
    meter = energy_meter(place)
    print("generation ...", flush=True)
    generation = generation_timings(loaded, contexts, rounds, new_tokens, sequences, meter)
    print("training ...", flush=True)
    vocabulary = min(of.config.vocab_size for of in loaded.values())
    training = training_timings(loaded, workload.batch(vocabulary), rounds, meter)
    rows = []
    for name, of in loaded.items():
        print(f"{name}: memory ...", flush=True)
        behind = {context: generation[name, context] for context in contexts}
        row = {"name": name, **figures(of, training[name], behind, workload, limits, price_per_hour)}
        row["training"]["peak_memory_bytes"] = training_memory(of.config, workload, place)
        rows.append(row)
    results = {
        "format_version": FORMAT_VERSION,
        "command": f"ssm-trn bench model {models}",
        "machine": machine_facts(),
        "device": {
            "name": device_name(place, machine_facts()["processor"]),
            "type": place.type,
            "memory_bytes": memory_size(place),
            "limits": limits,
            "limits_from": {name: "given" if value else "measured" for name, value in given.items()},
            "compiles": place.type == "xla",
        },
        "workload": {**asdict(workload), "price_per_hour": price_per_hour},
        "models": rows,
    }
    write_results(folder / RESULTS_FILE, results)
    model_report.write_report(results, folder)
    print(f"\n{model_report.training_table(results)}\n\n{model_report.generation_table(results)}")
    print(f"\n{folder / 'report.md'} has the details and plots.")
    return results


def _load(models: str) -> dict[str, LanguageModel]:
    """The models by the name of their file or folder."""
    loaded: dict[str, LanguageModel] = {}
    for word in (word.strip() for word in models.split(",")):
        if not word:
            raise ValueError("the name of a model is empty: give run folders or YAML files, separated by commas")
        path = Path(word)
        if path.stem in loaded:
            raise ValueError(f"two models are called {path.stem}: rename one of the files or folders")
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise FileNotFoundError(f"there is no model config {path}: give one such as configs/model/*.yaml")
            values = read_yaml(path)
            if not isinstance(values, dict):
                raise ValueError(f"{path} describes no model: give a file such as configs/model/*.yaml")
            loaded[path.stem] = LanguageModel(ModelConfig.from_dict(values))
        else:
            loaded[path.stem] = LanguageModel.from_pretrained(path)
    return loaded
