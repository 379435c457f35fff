"""Every mixer in a model that learns a pattern by heart."""

import pytest
import torch
import torch.nn.functional as F

from ssm_trn import LanguageModel, ModelConfig, mixers


@pytest.mark.parametrize("name", mixers.names())
def test_a_small_model_learns(name):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=7, d_model=32, layers=[name] * 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor([3, 1, 4, 1, 5]).repeat(4, 8)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
