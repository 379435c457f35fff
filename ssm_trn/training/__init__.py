"""Training with Lightning: the module, its schedule and parameter groups, and what surrounds the steps."""

from ssm_trn.training.module import LanguageModelModule
from ssm_trn.training.parameter_groups import parameter_groups
from ssm_trn.training.schedule import learning_rate_ratio

__all__ = ["LanguageModelModule", "learning_rate_ratio", "parameter_groups"]
