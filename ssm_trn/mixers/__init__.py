"""The mixers by name: one paper, one file. A new one needs a file and `@register("its_name")`.

Files outside this package are named by the environment variable SSM_TRN_MIXERS, separated by commas.
"""

import os
from importlib import import_module

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
        _import_own()
    if name not in _MIXERS:
        raise ValueError(
            f"unknown mixer '{name}': choose one of {', '.join(sorted(_MIXERS))}, or name its module in SSM_TRN_MIXERS"
        )
    return _MIXERS[name]


def _import_own() -> None:
    for module in filter(None, map(str.strip, os.environ.get("SSM_TRN_MIXERS", "").split(","))):
        try:
            import_module(module)  # it registers its mixers; a second import does nothing
        except ModuleNotFoundError as error:
            raise ValueError(f"SSM_TRN_MIXERS names '{module}', but {error}: is its folder on PYTHONPATH?") from error


def names() -> list[str]:
    return sorted(_MIXERS)


# They register themselves.
from ssm_trn.mixers import (  # noqa: E402, F401
    attention,
    based,
    deltanet,
    deltaproduct,
    gated_deltanet,
    gla,
    hgrn2,
    hyena,
    kda,
    linear_attention,
    lru,
    mamba,
    mamba2,
    mamba3,
    mlstm,
    retnet,
    rg_lru,
    rwkv6,
    rwkv7,
    s4d,
)
