"""What several formats have in common: names of tensors, layer types and rotary positions."""

from collections.abc import Iterator, Mapping
from typing import Any

from ssm_trn.interop.mapping import Pair, require, whole
from ssm_trn.interop.weights import Entry, entry
from ssm_trn.layers import GatedFeedForward, ShortConv
from ssm_trn.mixers.attention import Attention
from ssm_trn.model import LanguageModel

# The names that Llama gave to the parts around the layers.
LLAMA_PAIRS = (
    Pair("vocab_size", "vocab_size"),
    Pair("hidden_size", "d_model"),
    Pair("intermediate_size", "d_ff"),
    Pair("rms_norm_eps", "norm_eps", 1e-6),
    Pair("tie_word_embeddings", "tie_embeddings", False),
)


def llama_frame(model: LanguageModel, norm: str = "norm", offset: float = 0.0) -> Iterator[Entry]:
    """Embedding, last norm and head under Llama's names; `offset` is what the norms add to their weight."""
    yield entry("embedding.weight", "model.embed_tokens.weight")
    yield entry("norm.weight", f"model.{norm}.weight", offset=offset)
    if model.head is not None:
        yield entry("head.weight", "lm_head.weight")


def linear(ours: str, theirs: str, bias: bool = False) -> Iterator[Entry]:
    for part in ["weight", "bias"] if bias else ["weight"]:
        yield entry(f"{ours}.{part}", f"{theirs}.{part}")


def stacked(ours: str, theirs: list[str], rows: list[int], bias: bool = False, **how) -> Iterator[Entry]:
    """One linear map of ours for several of theirs, which have so many rows each."""
    for part in ["weight", "bias"] if bias else ["weight"]:
        yield entry(f"{ours}.{part}", *(f"{name}.{part}" for name in theirs), rows=tuple(rows), **how)


def convolution(theirs: str, conv: ShortConv) -> Iterator[Entry]:
    """`mixer.conv`: PyTorch's own convolutions have an axis more."""
    yield entry("mixer.conv.weight", f"{theirs}.weight", tail=(1, conv.weight.shape[1]))
    if conv.bias is not None:
        yield entry("mixer.conv.bias", f"{theirs}.bias")


def attention_maps(theirs: str, attention: Attention) -> Iterator[Entry]:
    """`mixer.in_proj` and `mixer.out_proj` of attention without a gate."""
    maps = [f"{theirs}.{name}_proj" for name in "qkv"]
    yield from stacked("mixer.in_proj", maps, attention.splits, attention.in_proj.bias is not None)
    yield from linear("mixer.out_proj", f"{theirs}.o_proj", attention.out_proj.bias is not None)


def feed_forward(theirs: str, layer: GatedFeedForward) -> Iterator[Entry]:
    """`feed_forward`, from the three maps of Llama."""
    bias, d_ff = layer.out_proj.bias is not None, layer.out_proj.in_features
    yield from stacked("feed_forward.gate_and_up", [f"{theirs}.gate_proj", f"{theirs}.up_proj"], [d_ff, d_ff], bias)
    yield from linear("feed_forward.out_proj", f"{theirs}.down_proj", bias)


def read_rotary(config: dict[str, Any], fraction: float | None = None) -> None:
    """Takes rope_parameters apart (or rope_theta and rope_scaling, as they were before transformers 5).

    It leaves rope_theta, and rotary_fraction where the format has such a `fraction` by default.
    """
    nested = config.pop("rope_parameters", None) or config.pop("rope_scaling", None) or {}
    config.pop("rope_scaling", None)
    if not isinstance(nested, Mapping):
        raise ValueError(f"config.json has rope_parameters = {nested!r}, which should be an object")
    kind = nested.get("rope_type", nested.get("type", "default"))
    require({"rope_type": kind}, "rope_type", "default")
    config["rope_theta"] = nested.get("rope_theta", config.get("rope_theta", 10000.0))
    older = config.pop("partial_rotary_factor", 1.0 if fraction is None else fraction)
    rotated = nested.get("partial_rotary_factor", older)
    if fraction is None:
        require({"partial_rotary_factor": rotated}, "partial_rotary_factor", 1.0)
    else:
        config["rotary_fraction"] = rotated
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown := nested.keys() - known:
        raise ValueError(f"config.json has {', '.join(sorted(unknown))} in rope_parameters, which ssm_trn lacks")


def write_rotary(config: dict[str, Any]) -> None:
    parameters = {"rope_type": "default", "rope_theta": config.pop("rope_theta", 10000.0)}
    if "rotary_fraction" in config:
        parameters["partial_rotary_factor"] = config.pop("rotary_fraction")
    config["rope_parameters"] = parameters


def read_layer_types(config: dict[str, Any], kinds: list[str], period: int) -> list[str]:
    """layer_types, or all layers linear attention but each `period`-th."""
    count = whole(config, "num_hidden_layers")
    del config["num_hidden_layers"]
    types = config.pop("layer_types", None)
    if types is None:
        types = ["full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not all(isinstance(one, str) for one in types):
        raise ValueError(f"config.json has layer_types that are no list of {count} names")
    for i, one in enumerate(types):
        require({f"layer_types[{i}]": one}, f"layer_types[{i}]", one if one in kinds else " or ".join(kinds))
    return types


def write_layer_types(config: dict[str, Any], kinds: list[str]) -> None:
    config["num_hidden_layers"] = len(kinds)
    config["layer_types"] = kinds
