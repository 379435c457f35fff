"""What linear attention, Based, HGRN2, DeltaProduct and RG-LRU promise besides what every mixer does."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from ssm_trn import mixers

from .cases import activations, make

NAMES = ["linear_attention", "based", "hgrn2", "deltaproduct", "gated_deltaproduct", "rg_lru"]


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_one_write_a_token_is_the_delta_rule(name):
    one = make(name)
    several = mixers.get(name.replace("net", "product"))
    other = several(32, n_writes=1, n_heads=2, value_head_dim=one.value_head_dim, negative_eigenvalues=False).double()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(activations(2, 70))[0], one(activations(2, 70))[0])


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("case", ["linear_attention", "based", "hgrn2", "hgrn2-bounded", "rg_lru"])
def test_saturated_gates_and_features_stay_finite(case, size):
    mixer, x = make(case, torch.float32), activations(2, 70, dtype=torch.float32).mul_(size).requires_grad_()
    y, state = mixer(x)
    gradients = torch.autograd.grad(
        (y * activations(2, 70, seed=5, dtype=torch.float32)).sum(), [x, *mixer.parameters()]
    )
    assert all(torch.isfinite(part).all() for part in (y, *state, *gradients))


def test_features_do_not_round_to_0():
    x = torch.tensor([-80.0, -17.5, 0.0, 3.0])
    assert_close(make("linear_attention").features(x), x.exp().where(x <= 0, x + 1), rtol=1e-6, atol=0)


def test_forget_gates_keep_their_digits_and_their_lower_bound():
    mixer = make("hgrn2-bounded", torch.float32)
    f = torch.tensor([-1e4, -90.0, -5.0, 0.0, 5.0, 12.0, 90.0, 1e4])[:, None]
    kept, log_f = mixer.gates(f)
    exact = 0.25 * torch.sigmoid(-f.double())
    assert_close(kept.double(), exact.expand_as(kept), rtol=1e-6, atol=1e-37)
    assert_close(log_f.double(), torch.log1p(-exact).expand_as(log_f), rtol=1e-6, atol=1e-37)
    torch.nn.init.constant_(mixer.gamma_logit, -1e3)  # a bound that was learned away
    _, log_f = mixer.gates(f)
    gradient = torch.autograd.grad(log_f.sum(), mixer.gamma_logit)[0]
    assert torch.isfinite(log_f).all() and torch.isfinite(gradient).all()


def test_initial_decays_are_those_of_the_papers():
    torch.manual_seed(0)
    mixer = mixers.get("rg_lru")(512)
    mixer.reset_parameters()
    slowest = torch.exp(-8 * F.softplus(mixer.Lambda))  # Griffin, section 2.4: uniform in [0.9, 0.999]
    assert 0.9 <= slowest.min() < 0.902 and 0.997 < slowest.max() <= 0.999
    assert abs(slowest.mean() - 0.9495) < 0.005
    bounded = make("hgrn2-bounded")
    assert_close(torch.sigmoid(bounded.gamma_logit), torch.full((32,), 0.75).double())
    assert make("hgrn2").gamma_logit is None
