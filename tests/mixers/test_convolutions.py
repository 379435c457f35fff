"""What LRU, S4D and Hyena promise besides what every mixer does."""

import math

import pytest
import torch
from torch.testing import assert_close

from ssm_trn import LanguageModel, ModelConfig, mixers
from ssm_trn.layers import Float32Parameters
from ssm_trn.mixers.s4d import decayed_sum, decaying
from ssm_trn.training import parameter_groups

from .cases import activations, make


def fresh(name, d_model=64, **options):
    torch.manual_seed(0)
    mixer = mixers.get(name)(d_model, **options).double()
    for module in mixer.modules():
        if isinstance(module, Float32Parameters):
            module.reset_parameters()
    return mixer


def random_flags(length, probability, seed):
    return torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < probability


@pytest.mark.parametrize("case", ["s4d", "s4d-inv", "s4d-real"])
@pytest.mark.parametrize("length", [1, 2, 9, 100])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_reset", [False, True])
def test_s4d_as_a_convolution_is_s4d_as_a_recurrence(case, length, masked, with_reset):
    mixer = make(case)
    x, shape = activations(2, length), mixer.A_log.shape
    memory = torch.randn(2, *shape, dtype=torch.float64 if mixer.A_imag is None else torch.complex128)
    mask = random_flags(length, 0.6, 1) if masked else None
    reset = random_flags(length, 0.1, 2) if with_reset else None
    real = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
    results = []
    for form in (mixer.convolve, mixer.recur):
        new = [x.clone().requires_grad_(), memory.clone().requires_grad_()]
        y, last = form(*new, mask, reset if mask is None or reset is None else reset & mask)
        total = (y[real] * activations(2, length, seed=3)[real]).sum() + last.abs().square().sum()
        parameters = [p for name, p in mixer.named_parameters() if name != "out_proj.weight"]
        results.append([y[real], last, *torch.autograd.grad(total, [*new, *parameters])])
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 10, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_sums_over_lags_are_split_rightly(length, dtype):
    weights, rate = torch.randn(2, 5, 3, dtype=dtype), -torch.rand(5, 3, dtype=dtype)
    powers = torch.exp(rate[..., None] * torch.arange(length))  # [D, N, T]
    assert_close(decaying(weights, rate, length), (weights[..., None] * powers).sum(-2).real)
    u = torch.randn(2, length, 5, dtype=torch.float64)
    assert_close(decayed_sum(u, rate), torch.einsum("bld,dnl->bdn", u.to(dtype), powers))


def test_s4d_starts_as_its_paper_says():
    for init, imaginary in (
        ("lin", [math.pi * n for n in range(3)]),
        ("inv", [6 / math.pi * (6 / (2 * n + 1) - 1) for n in range(3)]),
    ):
        mixer = fresh("s4d", d_state=6, init=init)
        dt, A, _, C = mixer.system()
        assert_close(A.real, torch.full_like(A.real, -0.5))
        assert_close(A.imag, torch.tensor(imaginary, dtype=torch.float64).expand(64, -1))
        assert abs(C.abs().square().mean() - 1) < 0.2
        assert 0.001 <= dt.min() < 0.003 and 0.05 < dt.max() <= 0.1
    _, A, _, C = fresh("s4d", d_state=4, init="real").system()
    assert_close(A, -torch.arange(1.0, 5.0, dtype=torch.float64).expand(64, -1))
    assert not C.is_complex()


def test_lru_starts_on_a_ring_and_keeps_the_size_of_its_input():
    mixer = fresh("lru", d_state=4000, r_min=0.6, r_max=0.9, max_phase=0.5)
    moduli, phases = torch.exp(-mixer.nu_log.exp()), mixer.theta_log.exp()
    assert 0.6 <= moduli.min() < 0.605 and 0.895 < moduli.max() <= 0.9
    assert abs(moduli.square().mean() - (0.6**2 + 0.9**2) / 2) < 0.005  # uniform over the area, not the radius
    assert phases.min() > 0 and 0.49 < phases.max() <= 0.5 and abs(phases.mean() - 0.25) < 0.01
    assert_close(mixer.gamma_log.exp(), torch.sqrt(1 - moduli**2))
    x = torch.randn(1, 400, 64, dtype=torch.float64)
    written = mixer.in_proj(x) * mixer.gamma_log.exp().repeat(2)
    h, _ = mixer.remember(written, None, None, None)
    assert abs(h[:, 100:].square().mean() / mixer.in_proj(x).square().mean() - 1) < 0.05


def test_hyena_grows_where_its_state_was_not_made_large_enough():
    mixer, x = make("hyena"), activations(2, 20)
    expected, _ = mixer(x)
    for made_for in (8, 20, 30):
        y, state = mixer(x[:, :8], mixer.init_state(2, made_for, "cpu", x.dtype))
        outs = [y]
        for t in range(8, 20):
            y, state = mixer(x[:, [t]], state)
            outs.append(y)
        assert_close(torch.cat(outs, 1), expected)
        assert state[-1].shape[1] == max(made_for, 20)
    assert mixer.state_size(2000) - mixer.state_size(1000) == 1000 * x.shape[2]


def test_hyena_forgets_what_a_reset_parts_off_and_needs_no_room_for_it():
    mixer, x = make("hyena"), activations(2, 30)
    reset = torch.zeros(2, 30, dtype=torch.bool)
    reset[:, ::10] = True
    _, state = mixer(x[:, :10], mixer.init_state(2, 10, "cpu", x.dtype))
    for part in (slice(10, 20), slice(20, 30)):
        y, state = mixer(x[:, part], state, None, reset[:, part])
        assert_close(y, mixer(x[:, part])[0])
        assert state[-1].shape[1] == 10


def test_the_filter_of_hyena_fades_over_its_context():
    layer = fresh("hyena", context_length=100).filter
    window = layer.window(torch.tensor([0.0, 0.3, 1.5], dtype=torch.float64))
    assert_close(window[0], torch.ones_like(window[0]))
    assert_close(window[1, -1].item(), 0.01)
    assert_close(window[2, 0].item(), 0.01)
    assert_close(layer(50), layer(200)[:50])  # a function of the lag alone


def test_recurrences_and_filters_are_not_decayed_also_after_loading(tmp_path):
    layers = [{"mixer": name, "feed_forward": "none"} for name in ("lru", "s4d", "hyena", "mlstm")]
    LanguageModel(ModelConfig(50, 32, layers)).save_pretrained(tmp_path)
    (_, kept) = parameter_groups(LanguageModel.from_pretrained(tmp_path), 0.1)
    assert kept["weight_decay"] == 0
    assert {name.partition("mixer.")[2] for name, _ in kept["params"] if "mixer." in name} == {
        *("nu_log", "theta_log", "gamma_log", "D"),
        *("dt_log", "A_log", "A_imag"),
        *("conv.bias", "filter.in_weight", "filter.hidden_weight", "filter.out_weight", "filter.biases"),
        *("filter.frequency", "gate_bias", "norm_weight"),
    }
