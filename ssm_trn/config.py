"""What a model is made of, as plain values that YAML and JSON can hold."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field
from typing import Any, get_args, get_type_hints

from ssm_trn import mixers

FEED_FORWARDS = ("swiglu", "geglu", "none")
_PLAIN_TYPES = {bool, int, float, str, type(None)}


def check_types(owner: str, values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """A ValueError for the first value that is not of its hint's type, such as '3' or 3.0 where 3 is meant.

    Hints other than bool, int, float, str, None and unions of them are not looked at.
    """
    for name, value in values.items():
        types = set(get_args(hints.get(name)) or {hints.get(name)})
        if not types <= _PLAIN_TYPES:
            continue
        fits = type(value) in types or (type(value) is int and float in types)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            wanted = " or ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in types))
            raise ValueError(f"{owner}: {name} is {value!r}, which should be of type {wanted}")


@dataclass(frozen=True)
class LayerConfig:
    """One block: a mixer by name with its options, and the feed-forward layer behind it ("swiglu", "geglu" or "none").

    norm_output: the norms stand behind mixer and feed-forward layer, on what they add to the residual stream, instead
        of before them (the reordered norm of OLMo 2, arXiv:2501.00656).
    """

    mixer: str
    feed_forward: str = "swiglu"
    options: dict[str, Any] = field(default_factory=dict)
    norm_output: bool = False

    def __post_init__(self):
        check_types("a layer", vars(self), get_type_hints(LayerConfig))
        mixer = mixers.get(self.mixer)
        known = inspect.signature(mixer).parameters
        for option in self.options:
            if option not in known or option == "d_model":
                raise ValueError(
                    f"mixer '{self.mixer}' has no option '{option}': it takes {', '.join(list(known)[1:])}"
                )
        check_types(f"mixer '{self.mixer}'", self.options, get_type_hints(mixer.__init__))
        # All options are kept, so that a saved model stays what it is when a default changes.
        defaults = {name: option.default for name, option in list(known.items())[1:]}
        object.__setattr__(self, "options", defaults | self.options)
        if self.feed_forward not in FEED_FORWARDS:
            raise ValueError(f"feed_forward '{self.feed_forward}' is none of {', '.join(FEED_FORWARDS)}")

    @classmethod
    def of(cls, layer: "str | Mapping[str, Any] | LayerConfig") -> "LayerConfig":
        """A layer from its short form: a mixer's name, or {mixer, feed_forward, **options of the mixer}."""
        if isinstance(layer, LayerConfig):
            return layer
        if isinstance(layer, str):
            return cls(layer)
        if not isinstance(layer, Mapping):
            raise ValueError(f"layer {layer!r} is neither a mixer's name nor a mapping with its options")
        options = dict(layer)
        if "mixer" not in options:
            raise ValueError(f"layer {dict(layer)} names no mixer: add 'mixer: {next(iter(mixers.names()))}'")
        mixer, feed_forward = options.pop("mixer"), options.pop("feed_forward", "swiglu")
        return cls(mixer, feed_forward, norm_output=options.pop("norm_output", False), options=options)

    def to_dict(self) -> dict[str, Any]:
        placed = {"norm_output": True} if self.norm_output else {}
        return {"mixer": self.mixer, "feed_forward": self.feed_forward, **placed, **self.options}


@dataclass(frozen=True)
class ModelConfig:
    """A language model.

    Args:
        vocab_size: number of token ids.
        d_model: width of the residual stream.
        layers: the blocks from bottom to top, each a mixer's name or {mixer, feed_forward, **options of that mixer}.
        d_ff: width of the feed-forward layers; when None, 8/3 d_model rounded up to a multiple of 32.
        tie_embeddings: whether the output head is the embedding matrix.
        norm_eps: epsilon of the RMS norms around the mixers.
        vocab_multiple: the embedding matrix has its rows rounded up to a multiple of this (128 suits accelerators). The
            extra rows never get a logit, so loss, scores and samples do not know them.
        feed_forward_bias: whether the feed-forward layers have biases.
        embedding_scale: what the embeddings are multiplied by; Gemma has sqrt(d_model).
        logit_soft_cap: c of c tanh(logits / c), which bounds the logits (Gemma 2, arXiv:2408.00118); None: no bound.
    """

    vocab_size: int
    d_model: int
    layers: Sequence[str | dict[str, Any] | LayerConfig]
    d_ff: int | None = None
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    vocab_multiple: int = 1
    feed_forward_bias: bool = False
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None

    def __post_init__(self):
        check_types("the model config", vars(self), get_type_hints(ModelConfig))
        for name in ("vocab_size", "d_model", "d_ff", "vocab_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.norm_eps < 0:
            raise ValueError(f"norm_eps is {self.norm_eps}; it must be at least 0")
        for name in ("embedding_scale", "logit_soft_cap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not isinstance(self.layers, list | tuple) or not self.layers:
            raise ValueError("layers must be a list with at least one mixer, such as ['mamba2', 'attention']")
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", -(-8 * self.d_model // (3 * 32)) * 32)
        object.__setattr__(self, "layers", tuple(LayerConfig.of(layer) for layer in self.layers))

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def parameter_count(self) -> int:
        """Number of parameters, counted on the real module (made without memory)."""
        from ssm_trn.model import LanguageModel  # a model is made from its config, not the other way round

        return LanguageModel.without_memory(self).parameter_count()

    def flops_per_token(self, context_length: int) -> float:
        """Floating-point operations of a forward pass per token, counted on the real module; see flops.py."""
        from ssm_trn.flops import flops_per_token

        return flops_per_token(self, context_length)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "layers": [LayerConfig.of(layer).to_dict() for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        known = cls.__dataclass_fields__
        for name in values:
            if name not in known:
                raise ValueError(f"a model config has no '{name}': it takes {', '.join(known)}")
        missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
        if missing:
            raise ValueError(f"the model config lacks {', '.join(missing)}")
        return cls(**values)
