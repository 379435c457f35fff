"""Sequence models beyond the transformer for AWS Trainium, GPUs and CPUs, compared with transformers of their size."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssm_trn.interop.registration import register_with_transformers
from ssm_trn.version import VERSION

if TYPE_CHECKING:
    from ssm_trn.config import LayerConfig, ModelConfig
    from ssm_trn.model import LanguageModel

__version__ = VERSION
__all__ = ["LanguageModel", "LayerConfig", "ModelConfig"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # on first use: torch takes seconds to import, and `ssm-trn --help` does not need it
        return getattr(import_module("ssm_trn.model" if name == "LanguageModel" else "ssm_trn.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_with_transformers()
