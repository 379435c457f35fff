"""One table of options for both ways: what a model's options are called in another project's config.json.

Whatever the table does not name is an error, in either direction: an option of theirs that a model of ours does not
have, or one of ours that their format has no word for.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ssm_trn import mixers
from ssm_trn.config import LayerConfig, ModelConfig
from ssm_trn.interop.weights import Entry, prefixed
from ssm_trn.model import Block, LanguageModel

REQUIRED = object()


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Names, numbers of special tokens, how a model was first drawn or is run: nothing that the output of a trained model
# depends on. residual_in_fp32 only concerns models in half precision, whose residual stream is of their own dtype here.
COMMON = names(
    """model_type architectures transformers_version dtype torch_dtype bos_token_id eos_token_id pad_token_id use_cache
    initializer_range max_position_embeddings tokenizer_class _name_or_path rescale_prenorm_residual residual_in_fp32
    time_step_min time_step_max time_step_floor time_step_scale time_step_init_scheme"""
)


@dataclass(frozen=True)
class Pair:
    """An option under their name and ours; `default` is what its absence means in theirs.

    `optional` says that None is a value which both have, such as rope_theta of attention without positions.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    optional: bool = False


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer that a format has.

    Attributes:
        mixer, feed_forward, norm_output: of the LayerConfig that it becomes.
        pairs: options of the mixer that their config.json tells.
        weights: the entries of a block, without what stands before names of its tensors on either side.
        fixed: options of the mixer that all models of the format have.
    """

    mixer: str
    pairs: tuple[Pair, ...]
    weights: Callable[[Block], Iterable[Entry]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    feed_forward: str = "swiglu"
    norm_output: bool = False

    def stands_for(self, layer: LayerConfig) -> bool:
        own = self.mixer, self.feed_forward, self.norm_output
        return own == (layer.mixer, layer.feed_forward, layer.norm_output)


@dataclass(frozen=True)
class Format:
    """A project's way to write models to a folder.

    Attributes:
        name: what users call it; their `model_type` where they have one.
        architecture: their class of models.
        pairs: options of the whole model.
        kinds: kinds of layers by the name that `read_layers` gives them.
        weights: entries outside the layers.
        layer_prefix: of the tensors of layer {}.
        read_layers: takes their config apart in place: nested options become flat ones, what it checks itself goes. It
            returns the kinds of the layers.
        write_layers: the inverse: puts the kinds of the layers and nested options into a flat config.
        fixed: options of the whole model that all models of the format have, as functions of d_model.
        required: their options, each with the only value that a model of ours can have, which is also their default.
        computed: their options that follow from others, as functions of the flat config.
        unwritten: those of the computed ones that are no options in their config.json.
        ignored: their options that do not matter, beside COMMON.
        renames: patterns of other names for their tensors, with the names in the table.
        pickled: whether their reader only takes pytorch_model.bin.
        padded: whether the vocabulary's padding is part of the format.
    """

    name: str
    architecture: str | None
    pairs: tuple[Pair, ...]
    kinds: Mapping[str, LayerKind]
    weights: Callable[[LanguageModel], Iterable[Entry]]
    layer_prefix: str
    read_layers: Callable[[dict[str, Any]], list[str]]
    write_layers: Callable[[dict[str, Any], list[str]], None]
    fixed: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    unwritten: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    renames: tuple[tuple[str, str], ...] = ()
    pickled: bool = False
    padded: bool = False

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        """Our config from their config.json.

        Raises:
            ValueError: for what is missing, of a wrong kind, or not to be expressed in a model of ours.
        """
        flat = dict(theirs)
        kinds = self.read_layers(flat)
        for name, value in self.required.items():
            require(flat, name, value)
        for name, function in self.computed.items():
            require(flat, name, function(flat))
            flat[name] = function(flat)
        pairs = [*self.pairs, *(pair for kind in self.kinds.values() for pair in kind.pairs)]
        known = COMMON | self.ignored | self.required.keys() | self.computed.keys() | {pair.theirs for pair in pairs}
        if unknown := flat.keys() - known:
            shown = ", ".join(f"{name} = {flat[name]!r}" for name in sorted(unknown))
            raise ValueError(
                f"config.json has options unknown to the format {self.name}: {shown}; remove what the model does not "
                "depend on"
            )
        options = _taken(flat, self.pairs)
        layers = {name: self._layer(kind, flat) for name, kind in self.kinds.items() if name in kinds}
        fixed = {name: function(options["d_model"]) for name, function in self.fixed.items()}
        return ModelConfig(layers=[layers[name] for name in kinds], **options, **fixed)

    def _layer(self, kind: LayerKind, flat: Mapping[str, Any]) -> LayerConfig:
        options = _taken(flat, kind.pairs) | dict(kind.fixed)
        return LayerConfig(kind.mixer, kind.feed_forward, options, kind.norm_output)

    def write_config(self, model: LanguageModel) -> dict[str, Any]:
        """Their config.json from a model.

        Raises:
            ValueError: for what the format has no word for.
        """
        config, flat, kinds = model.config, {}, []
        for i, block in enumerate(model.blocks):
            kinds.append(self._kind_of(config.layers[i], i))
            kind = self.kinds[kinds[-1]]
            options = effective_options(config.layers[i], block)
            self._put(flat, kind.pairs, options, f"layer {i}")
            self._expect(kind.pairs, options, _defaults(kind.mixer) | dict(kind.fixed), f"layer {i}")
        options = {name: value for name, value in vars(config).items() if name != "layers"}
        if all(layer.feed_forward == "none" for layer in config.layers):
            del options["d_ff"]  # of no layer
        defaults = {name: own.default for name, own in ModelConfig.__dataclass_fields__.items()}
        defaults |= {name: function(config.d_model) for name, function in self.fixed.items()}
        self._put(flat, self.pairs, options, "the model")
        self._expect(self.pairs, options, defaults, "the model")
        for name, function in self.computed.items():
            if flat.setdefault(name, function(flat)) != function(flat):
                raise ValueError(
                    f"the format {self.name} has {name} {function(flat)} where this model has {flat[name]}"
                )
        written = {name: value for name, value in flat.items() if name not in self.unwritten}
        self.write_layers(written, kinds)
        return written

    def _kind_of(self, layer: LayerConfig, i: int) -> str:
        for name, kind in self.kinds.items():
            if kind.stands_for(layer):
                return name
        raise ValueError(
            f"the format {self.name} has no layer like layer {i}: mixer {layer.mixer}, feed_forward "
            f"{layer.feed_forward}, norm_output {layer.norm_output}"
        )

    def _put(self, flat: dict[str, Any], pairs: Iterable[Pair], options: Mapping[str, Any], owner: str) -> None:
        """Writes options under their names into the flat config of the whole model."""
        for pair in pairs:
            value = options[pair.ours]
            if value is None and not pair.optional:
                raise ValueError(f"the format {self.name} cannot express {pair.ours} None of {owner}")
            if type(pair.default) is int and isinstance(value, float):  # `expand`: any number in ours
                if not value.is_integer():
                    raise ValueError(f"the format {self.name} has {pair.theirs} in whole numbers, not {value}")
                value = int(value)
            if flat.setdefault(pair.theirs, value) != value:
                raise ValueError(
                    f"the format {self.name} has one {pair.theirs} for the whole model, but {owner} has {pair.ours} "
                    f"{value} beside {flat[pair.theirs]}"
                )

    def _expect(self, pairs: Iterable[Pair], options: Mapping[str, Any], values: Mapping[str, Any], owner: str) -> None:
        """A ValueError for the first option that has no pair and another value than the only one possible."""
        named = {pair.ours for pair in pairs}
        for name, value in options.items():
            if name not in named and value != values[name]:
                raise ValueError(f"the format {self.name} cannot express {name} {value} of {owner}")

    def entries(self, model: LanguageModel) -> list[Entry]:
        """Which of their tensors make up which of ours."""
        entries = list(self.weights(model))
        for i, (block, layer) in enumerate(zip(model.blocks, model.config.layers, strict=True)):
            kind = self.kinds[self._kind_of(layer, i)]
            entries += prefixed(kind.weights(block), f"blocks.{i}.", self.layer_prefix.format(i))
        return entries


def require(values: Mapping[str, Any], name: str, possible: Any) -> None:
    """A ValueError if values[name] is there and not the possible one."""
    value = values.get(name, possible)
    if value != possible or isinstance(value, bool) != isinstance(possible, bool):
        raise ValueError(f"config.json has {name} = {value!r}: a model of ssm_trn can only have {possible!r} there")


def whole(values: Mapping[str, Any], name: str) -> int:
    """values[name], an int of at least 1."""
    value = values.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json has {name} = {value!r}, which should be a whole number of at least 1")
    return value


def effective_options(layer: LayerConfig, block: Block) -> dict[str, Any]:
    """The options of a layer's mixer, with what the mixer chose where they say None."""
    return {name: getattr(block.mixer, name, None) if value is None else value for name, value in layer.options.items()}


def finite(values: Any) -> Any:
    """A config with transformers' way to write an infinite number in JSON undone."""
    if isinstance(values, dict):
        if values.keys() == {"__float__"}:
            return {"Infinity": math.inf, "-Infinity": -math.inf}.get(values["__float__"], math.nan)
        return {name: finite(value) for name, value in values.items()}
    return [finite(value) for value in values] if isinstance(values, list) else values


def _taken(flat: Mapping[str, Any], pairs: Iterable[Pair]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        if pair.theirs not in flat and pair.default is REQUIRED:
            raise ValueError(f"config.json lacks {pair.theirs}")
        value = options[pair.ours] = flat.get(pair.theirs, pair.default)
        if value is None and pair.default is not None and not pair.optional:
            raise ValueError(f"config.json has {pair.theirs} = None, which should have a value")
    return options


def _defaults(mixer: str) -> dict[str, Any]:
    return {name: option.default for name, option in inspect.signature(mixers.get(mixer)).parameters.items()}
