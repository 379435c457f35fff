"""What kernels/README.md shows works."""

import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ssm_nki.cumulative_sum import cumulative_sum

PAGE = Path(__file__).parents[2] / "kernels" / "README.md"
KERNEL, TORCH = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_running_a_kernel_and_its_cost(capsys):
    names = {"x": np.ones((130, 4), np.float32)}
    exec(KERNEL, names)
    assert (names["y"] == np.cumsum(names["x"], 0)).all()
    assert names["cumulative_sum"] is cumulative_sum
    assert "Cost(target=Target(name='trn2'" in capsys.readouterr().out


def test_kernels_from_pytorch():
    q, k, v = torch.randn(3, 1, 130, 2, 16, generator=torch.Generator().manual_seed(0))
    beta, log_decay = torch.full((1, 130, 2), 0.5), torch.full((1, 130, 2), -0.1)
    names = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "beta": beta, "log_decay": log_decay}
    exec(TORCH, names)
    out, _ = names["ops"].delta_rule(q, names["k"], v, beta, log_decay)
    assert not torch.equal(names["out"], out)  # another form ran
    torch.testing.assert_close(names["out"], out, rtol=1e-4, atol=1e-4)
