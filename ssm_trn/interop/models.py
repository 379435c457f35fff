"""Loading a model from a folder of any known format, and saving it to one."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from ssm_trn.files import write_whole
from ssm_trn.interop import checkpoint
from ssm_trn.interop.formats import FORMATS
from ssm_trn.interop.mapping import Format
from ssm_trn.interop.weights import Weights, to_ours, to_theirs
from ssm_trn.layers import float32_parameters, widened
from ssm_trn.model import CONFIG_FILE, WEIGHTS_FILE, LanguageModel

OWN_FORMAT = "ssm_trn"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load(folder: str | Path, online: bool = False) -> LanguageModel:
    """A model from a folder, whoever wrote it: a run of ssm_trn, or a format that `ssm-trn convert --help` lists.

    The weights keep their dtype, but that gates, decays and norms are float32 at least. Nothing in the folder is
    executed, and no code is fetched.

    Args:
        folder: the path of a folder; with `online`, a name on the hub such as "state-spaces/mamba2-130m".
        online: fetch the model from the hub.

    Raises:
        FileNotFoundError: if there is no model, or a part of it is missing.
        ValueError: if its format is unknown, has an option that our models do not have, or its weights do not fit.
    """
    folder = fetch(str(folder)) if online else Path(folder)
    theirs = checkpoint.read_config(folder)
    if is_own(theirs):
        return LanguageModel.from_pretrained(folder)
    form = format_of(theirs, folder)
    weights = _renamed(checkpoint.read_weights(folder), form)
    layers = theirs.get("num_hidden_layers", theirs.get("n_layer"))
    if isinstance(layers, int) and layers > len(weights):
        raise ValueError(f"{folder / CONFIG_FILE} tells of {layers} layers, and there are {len(weights)} tensors")
    try:
        config = form.read_config(theirs)
        model = LanguageModel.without_memory(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond what a tensor, or 64 bits, can have
        raise ValueError(f"{folder / CONFIG_FILE} describes a model that no machine can hold") from error
    entries = form.entries(model)
    if config.tie_embeddings:
        _drop_tied_head(weights, entries[0].theirs[0], folder)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    ours = to_ours(weights, entries, shapes, str(folder))
    model.load_state_dict(_in_their_dtypes(ours, model), assign=True)
    return model


def save(
    model: LanguageModel, folder: str | Path, format: str = OWN_FORMAT, special_ids: Mapping[str, Any] | None = None
) -> None:
    """Writes a model into a folder in the format of another project, each file whole or not at all.

    Args:
        model: any model that the format has words for.
        folder: is made where it does not exist.
        format: one that `ssm-trn convert --help` lists, or "ssm_trn".
        special_ids: bos_token_id, eos_token_id and pad_token_id, for those that generate; unset ones are null.

    Raises:
        ValueError: for an unknown format, or a model that it cannot express.
    """
    folder = Path(folder)
    if format == OWN_FORMAT:
        return model.save_pretrained(folder)
    form = FORMATS[require_format(format)]
    config, ours = model.config, dict(model.state_dict())
    if not form.padded and config.vocab_multiple != 1:  # the spare rows never get a logit
        for name in ("embedding.weight", "head.weight"):
            if name in ours:
                ours[name] = ours[name][: config.vocab_size]
        model = LanguageModel.without_memory(replace(config, vocab_multiple=1))
    theirs = form.write_config(model)
    weights = to_theirs(ours, form.entries(model))
    if form.architecture is not None:
        ids = dict.fromkeys(SPECIAL_IDS) | dict(special_ids or {})
        dtype = str(ours["embedding.weight"].dtype).removeprefix("torch.")
        theirs |= {"architectures": [form.architecture], "model_type": form.name, "dtype": dtype, **ids}
    folder.mkdir(parents=True, exist_ok=True)
    if form.pickled:
        if model.head is None:  # their reader wants the head named even where it is the embedding
            weights["lm_head.weight"] = ours["embedding.weight"]
        checkpoint.write_pickle(folder / checkpoint.PICKLED_FILE, weights)
    else:
        checkpoint.write_safetensors(folder / WEIGHTS_FILE, weights)
    write_whole(folder / CONFIG_FILE, json.dumps(theirs, indent=2) + "\n")


def format_of(theirs: Mapping[str, Any], folder: Path) -> Format:
    """The format that a config.json is in."""
    if "n_layer" in theirs and "d_model" in theirs and "model_type" not in theirs:
        options = theirs.get("ssm_cfg") or {}
        mamba2 = isinstance(options, Mapping) and options.get("layer") == "Mamba2"
        return FORMATS["state_spaces_mamba2" if mamba2 else "state_spaces_mamba"]
    name = theirs.get("model_type")
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"{folder / CONFIG_FILE} has model_type {name!r}, which cannot be read: choose a model of one of "
            f"{', '.join(FORMATS)}"
        )
    return FORMATS[name]


def fetch(name: str) -> Path:
    """The folder of a model from the hub: its JSON files and its weights, as safetensors where it has them."""
    from huggingface_hub import snapshot_download

    texts = ["*.json", "*.model", "*.txt", "*.jinja"]
    folder = Path(snapshot_download(name, allow_patterns=[*texts, "model*.safetensors"]))
    if not list(folder.glob("model*.safetensors")):
        folder = Path(snapshot_download(name, allow_patterns=[*texts, "pytorch_model*.bin"]))
    return folder


def require_format(name: str) -> str:
    """The name, or a ValueError if it is that of no format."""
    if name not in (OWN_FORMAT, *FORMATS):
        raise ValueError(f"unknown format '{name}': choose one of {', '.join((OWN_FORMAT, *FORMATS))}")
    return name


def is_own(config: Mapping[str, Any]) -> bool:
    """Whether a config.json was written by ssm_trn."""
    return "format_version" in config


def _renamed(weights: Weights, form: Format) -> Weights:
    """The tensors under the names that the format's table has; those without a name there are constants."""
    renamed = {}
    for name, value in weights.items():
        for pattern, replacement in form.renames:
            name = re.sub(pattern, replacement, name)
        if name in renamed:
            raise ValueError(f"two of the tensors are called {name}")
        if name:
            renamed[name] = value
    return renamed


def _drop_tied_head(weights: Weights, embedding: str, folder: Path) -> None:
    """Some writers store the embedding once more, as the head."""
    head, own = weights.pop("lm_head.weight", None), weights.get(embedding)
    if head is not None and own is not None and not torch.equal(head, own.to(head.dtype)):
        raise ValueError(
            f"{folder / CONFIG_FILE} says that head and embedding are one, and the weights have lm_head.weight of its "
            "own: set tie_word_embeddings (tie_embeddings) to false"
        )


def _in_their_dtypes(ours: Weights, model: LanguageModel) -> Weights:
    """What stays in float32 in float32; all other weights in the widest dtype among them, as products need one."""
    kept = float32_parameters(model)
    dtype = reduce(torch.promote_types, (value.dtype for name, value in ours.items() if name not in kept))
    return {name: widened(value) if name in kept else value.to(dtype) for name, value in ours.items()}
