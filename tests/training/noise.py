"""A module of tests whose steps draw from every generator there is, as a dropout would."""

import random

import numpy as np
import torch

from ssm_trn.training import LanguageModelModule


class NoisyModule(LanguageModelModule):
    """Weighs the loss of each step by chance."""

    def training_step(self, batch, batch_idx):
        noise = torch.rand(()).item() + np.random.rand() + random.random()
        self.log("noise", noise)
        return super().training_step(batch, batch_idx) * noise
