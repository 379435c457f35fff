"""Models of the same size: a comparison is fair only if both have as many parameters."""

from dataclasses import replace

from ssm_trn.config import LayerConfig, ModelConfig

_NARROWEST, _WIDEST = 1.0, 8.0  # feed-forward width over d_model that still makes a sensible model


def match_parameters(config: ModelConfig, target: int, tolerance: float = 0.01, width_multiple: int = 8) -> ModelConfig:
    """The config nearest to `config` that has `target` parameters to within `tolerance`.

    The feed-forward width gives way first, since it divides finely and leaves the mixers alone; only where it would
    become unreasonable (or no layer has one) does d_model change, to the nearest value that does.

    Args:
        config: what to start from; depth, vocabulary and options of the mixers stay as they are.
        target: number of parameters.
        tolerance: largest relative difference.
        width_multiple: both widths stay multiples of this.

    Raises:
        ValueError: if no width reaches the target; the nearest one is named.
    """
    nearest = None
    for d_model in _by_distance(config.d_model, width_multiple):
        candidate = _match_feed_forward(replace(config, d_model=d_model), target, width_multiple)
        if candidate is None:
            continue
        error = abs(candidate.parameter_count() / target - 1)
        if error <= tolerance:
            return candidate
        if nearest is None or error < nearest[0]:
            nearest = (error, candidate)
    if nearest is None:
        raise ValueError(f"no width near {config.d_model} suits the options of these layers: choose another d_model")
    raise ValueError(
        f"no width brings this model to {target:,} parameters: the nearest, d_model {nearest[1].d_model}, "
        f"has {nearest[1].parameter_count():,}; change the number of layers"
    )


def _by_distance(d_model: int, multiple: int) -> list[int]:
    """d_model itself, then multiples up to twice and down to half of it, the nearest first."""
    start = -(-d_model // 2 // multiple) * multiple
    return [d_model, *sorted(range(start, 2 * d_model + 1, multiple), key=lambda width: abs(width - d_model))]


def _match_feed_forward(config: ModelConfig, target: int, multiple: int) -> ModelConfig | None:
    """`config` with the feed-forward width that comes nearest to the target, or None if its widths do not fit."""
    narrowest = -(-int(_NARROWEST * config.d_model) // multiple) * multiple
    try:
        count = replace(config, d_ff=narrowest).parameter_count()
    except ValueError:  # this d_model does not divide into the mixers' heads
        return None
    layers = sum(LayerConfig.of(layer).feed_forward != "none" for layer in config.layers)
    if layers == 0:
        return config
    growth = layers * 3 * config.d_model * multiple  # SwiGLU and GeGLU have three matrices
    steps = max(0, round((target - count) / growth))
    return replace(config, d_ff=min(narrowest + steps * multiple, int(_WIDEST * config.d_model) // multiple * multiple))
