"""Models from and to other projects: their formats of weights, their classes, their tokenizers.

mapping.py, weights.py   the two tables of a format, of options and of tensors, each read both ways
formats/                 the tables, a file for each family
checkpoint.py            files: safetensors, several of them, pickles of tensors alone
models.py                `load` and `save`
command.py               `ssm-trn convert`
tokenizer.py             our tokenizer as a tokenizer.json
registration.py          makes AutoConfig and AutoModelForCausalLM know ssm_trn's folders
auto.py                  the classes that they then find

Only the last needs transformers (`pip install 'ssm-trn[hf]'`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssm_trn.interop.models import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # on first use: `import ssm_trn` loads a part of this package and must not load torch
        return getattr(import_module("ssm_trn.interop.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
