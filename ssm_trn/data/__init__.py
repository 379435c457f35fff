"""Text on disk, a lossless tokenizer, and the batches that training sees."""

from typing import TYPE_CHECKING, Any

from ssm_trn.data.token_file import TokenFile, held_out_documents, read_meta
from ssm_trn.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ssm_trn.data.datamodule import TokenDataModule

__all__ = ["TokenDataModule", "TokenFile", "Tokenizer", "held_out_documents", "read_meta"]


def __getattr__(name: str) -> Any:
    if name == "TokenDataModule":  # on first use: it imports Lightning, which takes seconds
        from ssm_trn.data.datamodule import TokenDataModule

        return TokenDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
