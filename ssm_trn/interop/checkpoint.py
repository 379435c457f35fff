"""The files of a model in a folder: config.json, and weights in one file or several.

Nothing in them is executed: safetensors hold numbers alone, and pickles (pytorch_model.bin) are read by PyTorch's
reader that makes nothing but tensors.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ssm_trn.files import replacing
from ssm_trn.interop.mapping import finite
from ssm_trn.interop.weights import Weights
from ssm_trn.model import CONFIG_FILE, WEIGHTS_FILE

PICKLED_FILE = "pytorch_model.bin"
_INDEX = ".index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json, as another project or ours wrote it."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        hint = "" if folder.exists() else "; to fetch a model from the hub, ask for it with online"
        raise FileNotFoundError(f"{folder} holds no model: there is no {CONFIG_FILE}{hint}")
    return read_json(path)


def read_weights(folder: Path) -> Weights:
    """All tensors of a folder by name, as they are stored.

    Raises:
        FileNotFoundError: if there are no weights, or one of their files is missing.
        ValueError: if a file is damaged, or holds anything but tensors of floating-point numbers.
    """
    for name, read in ((WEIGHTS_FILE, _read_safetensors), (PICKLED_FILE, _read_pickle)):
        if (folder / name).is_file():
            return _floating(read(folder / name), folder)
        if (folder / (name + _INDEX)).is_file():
            return _floating(_read_parts(folder / (name + _INDEX), read), folder)
    raise FileNotFoundError(f"{folder} holds no weights: there is no {WEIGHTS_FILE} and no {PICKLED_FILE}")


def write_safetensors(path: Path, weights: Weights) -> None:
    """Writes tensors so that transformers reads them, whole or not at all."""
    with replacing(path) as unfinished:
        save_file(weights, unfinished, metadata={"format": "pt"})


def write_pickle(path: Path, weights: Weights) -> None:
    """Writes tensors as a PyTorch pickle, whole or not at all."""
    with replacing(path) as unfinished:
        torch.save(weights, unfinished)


def _read_parts(index: Path, read: Callable[[Path], Weights]) -> Weights:
    names = read_json(index).get("weight_map")
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} does not say which file holds which tensor")
    weights: Weights = {}
    for name in sorted(set(names.values())):
        if Path(name).name != name:
            raise ValueError(f"{index} names '{name}', which is no file of its own folder")
        if not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index.parent} lacks {name}, which {index.name} names")
        weights |= read(index.parent / name)
    if absent := sorted(names.keys() - weights.keys()):
        raise ValueError(f"the files of {index} lack {', '.join(absent)}")
    return weights


def _read_safetensors(path: Path) -> Weights:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or a damaged one: {error}") from error


def _read_pickle(path: Path) -> Weights:
    with open(path, "rb") as file:
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # the reader takes damaged bytes for anything, and fails in as many ways
            raise ValueError(f"{path} is damaged, or holds more than tensors, and is not read") from error
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise ValueError(f"{path} is no dictionary of tensors by name")
    return weights


def _floating(weights: Weights, folder: Path) -> Weights:
    for name, value in weights.items():
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise ValueError(f"{folder} has {name} in {value.dtype}: only weights in 16, 32 or 64 bits can be read")
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError if it is none."""
    try:
        content = finite(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object")
    return content
