"""For all tests: one thread each, as the sizes are small and several tests run at once."""

import torch

torch.set_num_threads(1)
