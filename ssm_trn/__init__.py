"""Sequence models beyond the transformer, trained on AWS Trainium, a GPU or a CPU, and compared with transformers."""

from ssm_trn.config import LayerConfig, ModelConfig
from ssm_trn.model import LanguageModel
from ssm_trn.version import VERSION

__version__ = VERSION
__all__ = ["LanguageModel", "LayerConfig", "ModelConfig"]
