"""The mixers by name: one paper, one file. A new one needs a file and `@register("its_name")`."""

from ssm_trn.mixers.base import Mixer

_MIXERS: dict[str, type[Mixer]] = {}


def register(name: str):
    """Class decorator: makes a mixer usable as `layers: [name]`."""

    def add(mixer: type[Mixer]) -> type[Mixer]:
        if name in _MIXERS:
            raise ValueError(f"there is a mixer '{name}' already: choose another name")
        _MIXERS[name] = mixer
        return mixer

    return add


def get(name: str) -> type[Mixer]:
    """The mixer class registered under `name`; a ValueError lists the names there are."""
    if name not in _MIXERS:
        raise ValueError(f"unknown mixer '{name}': choose one of {', '.join(sorted(_MIXERS))}")
    return _MIXERS[name]


def names() -> list[str]:
    return sorted(_MIXERS)


# They register themselves.
from ssm_trn.mixers import attention, deltanet, gated_deltanet, gla, kda, mamba, mamba2, retnet  # noqa: E402, F401
