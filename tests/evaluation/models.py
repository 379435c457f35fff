"""Models to evaluate: tiny ones with random weights, and one whose scores can be read off a table."""

import torch
from torch import nn

from ssm_trn import LanguageModel, ModelConfig

LAYERS = {
    "recurrent": ["mamba2", "mamba2"],
    "hybrid": ["gated_deltanet", {"mixer": "attention", "n_heads": 2, "window": 8}],
    "transformer": [{"mixer": "attention", "n_heads": 2}] * 2,
}


def tiny_model(kind: str, vocab_size: int, seed: int = 0) -> LanguageModel:
    """A model with weights large enough that its predictions differ from token to token."""
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(vocab_size, d_model=32, d_ff=32, layers=LAYERS[kind])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith("head"):
                parameter.mul_(4)
    return model


class BigramModel(nn.Module):
    """The logits of the next token are a row of a table: log-probabilities can be read off it."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = nn.Parameter(table)
        self.config = ModelConfig(len(table), d_model=8, layers=["attention"])

    def init_state(self, batch, max_length, device=None, dtype=None):
        return ()

    def features(self, tokens, state=None, mask=None, reset=None):
        return nn.functional.one_hot(tokens, len(self.table)).to(self.table.dtype), ()

    def logits(self, features):
        return features @ self.table

    def forward(self, tokens, state=None, mask=None, reset=None):
        features, state = self.features(tokens, state, mask, reset)
        return self.logits(features), state
