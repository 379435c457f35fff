"""What RWKV-6, RWKV-7 and Mamba-3 promise besides what every mixer does."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from ssm_trn import LanguageModel, ModelConfig, mixers
from ssm_trn.mixers.mamba3 import running_turns, within_a_turn
from ssm_trn.training import parameter_groups

from .cases import activations, make

NAMES = ["rwkv6", "rwkv7", "mamba3"]


def initial(name, d_model=128, **options):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(7, d_model, [{"mixer": name, **options}])).blocks[0].mixer


@pytest.mark.parametrize("depth", [0.0, 0.25])
def test_the_initial_values_of_rwkv6_are_those_of_appendix_i(depth):
    mixer, channels = initial("rwkv6", depth=depth), range(128)
    mu_x, mu_d, mu_k, mu_v, mu_r, mu_g = mixer.shift.view(6, -1)
    ramp = torch.tensor([1 - (i / 128) ** (1 - depth) for i in channels])
    for mu, expected in (
        (mu_x, ramp),
        (mu_d, ramp),
        (mu_k, ramp),
        (mu_v, ramp - 0.3 * depth),
        (mu_r, torch.tensor([1 - (i / 128) ** ((1 - depth) / 2) for i in channels])),
        (mu_g, mu_r),
    ):
        assert_close(mu, expected)
    assert_close(mixer.decay_bias, torch.tensor([-6 + 5 * (i / 127) ** (0.7 + 1.3 * depth) for i in channels]))
    waves = [depth * (1 - i / 127) + 0.1 * ((i + 1) % 3) - 0.1 for i in channels]
    assert_close(mixer.bonus, torch.tensor(waves), atol=1e-6, rtol=1e-5)
    for projection in (mixer.shift_down, *mixer.shift_up, mixer.decay_proj[0], mixer.decay_proj[2]):
        assert 0.9e-4 < projection.weight.abs().max() <= 1e-4
    assert 0.99 * 128**-0.5 < mixer.k_proj.weight.abs().max() <= 128**-0.5


@pytest.mark.parametrize("depth", [0.0, 0.25])
def test_the_initial_values_of_rwkv7_are_those_of_its_code(depth):
    mixer = initial("rwkv7", depth=depth)
    for mu, exponent in zip(mixer.shift.view(6, -1), (0.2, 0.7, 0.7, 0.9, 0.9, 0.2), strict=True):
        assert_close(mu, torch.tensor([1 - (i / 128) ** (exponent * (1 - depth)) for i in range(128)]))
    for i in (0, 1, 40, 63, 64, 100, 127):
        across = (i % 64 - 31.5) / 31.5
        wave, centred = across * abs(across), i / 127 - 0.5
        decay = -6 + 6 * (i / 127) ** (1 + depth**0.3) + 0.5 + 2.5 * wave
        values = decay, -0.19 + 0.3 * wave + 0.4 * centred, 0.71 - 0.1 * centred, 1.02, -0.04
        ours = (part[i] for part in (mixer.decay_bias, mixer.rate_bias, mixer.xi, mixer.alpha, mixer.rho))
        assert_close(torch.stack(list(ours)), torch.tensor(values), atol=1e-5, rtol=1e-5)
    for projection, size in ((mixer.r_proj, 0.5), (mixer.k_proj, 0.05), (mixer.v_proj, 0.5)):
        assert 0.99 * size * 128**-0.5 < projection.weight.abs().max() <= size * 128**-0.5
    for down, _, up in (mixer.decay_proj, mixer.rate_proj, mixer.gate_proj):
        assert down.weight.eq(0).all()
        assert_close(up.weight.T @ up.weight, 0.01 * torch.eye(up.in_features), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("d_model, rank, gate_rank", [(64, 32, 32), (768, 64, 128), (2048, 96, 256), (2560, 96, 320)])
def test_the_ranks_of_rwkv7_are_those_of_the_published_models(d_model, rank, gate_rank):
    with torch.device("meta"):
        mixer = mixers.get("rwkv7")(d_model)
    maps = (mixer.decay_proj, mixer.rate_proj, mixer.gate_proj)
    assert [down.out_features for down, *_ in maps] == [rank, rank, gate_rank]


def test_the_initial_values_of_mamba3():
    mixer = initial("mamba3", d_state=16)
    for ones in (mixer.B_bias, mixer.C_bias, mixer.D, mixer.B_norm.weight):
        assert ones.eq(1).all()
    assert ((F.softplus(mixer.dt_bias) > 0.99e-3) & (F.softplus(mixer.dt_bias) < 0.101)).all()


@pytest.mark.parametrize("name", NAMES)
def test_matrices_alone_are_decayed(name):
    mixer = initial(name)
    decayed = {p for p, _ in parameter_groups(mixer, weight_decay=0.1)[0]["params"]}
    matrices = {f"{m}.weight" for m, module in mixer.named_modules() if isinstance(module, torch.nn.Linear)}
    assert decayed == matrices


def test_the_first_step_of_rwkv_leans_on_zeros_and_the_next_on_it():
    for name in ("rwkv6", "rwkv7"):
        mixer, x = make(name), activations(1, 2)
        zeros = torch.zeros(1, 1, 32, dtype=torch.float64)
        assert_close(mixer(torch.cat([zeros, x], 1))[0][:, 1:], mixer(x)[0])
        assert torch.equal(mixer(x)[1][0], x[:, 1:])


@pytest.mark.parametrize("step", [0.05, 0.4999, 37.3])
def test_angles_stay_accurate_however_often_they_turn(step):
    length = 2**15
    turns = torch.full((1, length, 2), step) * torch.tensor([1.0, -0.7])
    exact = turns.double().cumsum(1)
    sums = running_turns(turns, None)
    assert sums.abs().max() <= 0.5
    assert within_a_turn(sums - exact).abs().max() < 1e-5
    assert within_a_turn(turns.cumsum(1) - exact).abs().max() > 3e-5  # what a plain sum would do
    halves = running_turns(turns[:, :999], None)
    rest = running_turns(turns[:, 999:], halves[:, -1])
    assert within_a_turn(torch.cat([halves, rest], 1) - exact).abs().max() < 1e-5


def test_a_turning_state_counts_modulo_its_period():
    """A state that turns by a quarter at each token and keeps what it holds: after four tokens it is where it was."""
    mixer = mixers.get("mamba3")(2, d_state=2, expand=1, head_dim=2, rotary_fraction=1.0).double()
    z, u, B, C, dt, A, trapezoid, angle = (torch.zeros(size, 2).double() for size in mixer.splits)
    z[:, 0] = 40  # silu(40) = 40
    u[0, 1] = 1
    A[:, 0] = -40  # the slowest decay
    angle[:, 0] = math.atanh(0.5)
    with torch.no_grad():
        mixer.in_proj.weight.copy_(torch.cat([z, u, B, C, dt, A, trapezoid, angle]))
        mixer.dt_bias.fill_(math.log(math.e - 1))  # steps of length 1
        mixer.B_bias.copy_(torch.tensor([1.0, 0.0]))
        mixer.C_bias.copy_(torch.tensor([1.0, 0.0]))
        mixer.D.zero_()
        mixer.out_proj.weight.copy_(torch.eye(2).double() / 40)
    x = torch.tensor([[1.0, 1.0]] + [[1.0, 0.0]] * 12).double()  # one token writes
    y = mixer(x[None])[0][0, :, 0]
    kept = torch.exp(-1e-4 * torch.arange(13).double())
    # Half of what is written comes at once, the other half a step later.
    assert_close(y, torch.tensor([0.5, 0, -1, 0, 1, 0, -1, 0, 1, 0, -1, 0, 1]) * kept, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("case", [*NAMES, "mamba3-groups"])
def test_saturated_gates_stay_finite(case, size):
    mixer, x = make(case, torch.float32), activations(2, 70, dtype=torch.float32).mul_(size).requires_grad_()
    y, state = mixer(x)
    loss = (y * activations(2, 70, seed=5, dtype=torch.float32)).sum()
    gradients = torch.autograd.grad(loss, [x, *mixer.parameters()])
    assert all(torch.isfinite(part).all() for part in (y, *state, *gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_channel_of_rwkv6_that_forgets_at_once_has_gradients(dtype):
    mixer, x, outs = make("rwkv6", dtype), activations(2, 70, dtype=dtype), []
    for decay_bias in (20.0, 1000.0):  # w_t is 0 with either, but exp(1000) is inf
        mixer.decay_bias.data[:5] = decay_bias
        y, _ = mixer(x)
        outs.append((y, *torch.autograd.grad(y.square().sum(), [*mixer.parameters()])))
    assert all(torch.isfinite(part).all() for part in outs[1])
    assert_close(outs[1], outs[0], rtol=0, atol=0)
