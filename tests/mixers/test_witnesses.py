"""Each mixer equals an implementation that we did not write, or a plain loop written from its paper.

    mixer           what it is compared with                        how
    attention       transformers' Llama, Mistral, Qwen3             whole models: grouped heads, window, QK-norm
    mamba           transformers' Mamba                             whole model
    mamba2          transformers' Mamba-2                           whole model, 1 and 2 groups
                    loop: norm before the gate, negative decays     the mixer
    retnet          loop (equation 1, in complex numbers)           the mixer
                    transformers' MiniMax lightning attention       its fixed decay
    gla             loop (section 4.1)                              the mixer
    deltanet        loop (section 2.2)                              the mixer, both ranges of beta
    gated_deltanet  transformers' Qwen3-Next, OLMo Hybrid           whole models: grouped heads, both ranges of beta
    kda             transformers' Kimi Linear                       whole model
    linear_attention, based  all pairs of tokens (equation 8)       the mixer
    hgrn2           loop (section 3)                                the mixer, with and without lower bound
    deltaproduct    loop (section 3)                                the mixer, both ranges of beta, gated
    rg_lru          transformers' RecurrentGemma                    the mixer
    rwkv6, rwkv7    loop (sections 4.2 and 4.1)                     the mixer
    mamba3          loop (proposition 1, in complex numbers)        the mixer, 1 and 2 groups
    lru             loop (equations 2 to 7, in complex numbers)     the mixer
    s4d             loop (equations 1 and 2)                        the mixer, three initial A
    hyena           its matrices, multiplied out (section 3)        the mixer
    mlstm           transformers' xLSTM                             the mixer
                    loop (equations 19 to 27)                       the mixer, gates without soft cap

Whole models (witnesses.py) also prove the order of a block, its norms, the feed-forward layer and the head. The loops
run in float64, on rows without their padding.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from ssm_trn import mixers, ops

from . import witnesses_convolution, witnesses_linear, witnesses_rwkv_mamba3
from .cases import activations, make
from .loops import convolved, rms_norm, unit
from .witnesses import VOCABULARY, WITNESSES, import_transformers

TOLERANCE = 1e-4
STEPS = 5  # tokens decoded one by one after the prefill

lengths = pytest.mark.parametrize("length", [1, 7, 65, 300])


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_every_mixer_has_a_witness():
    witnessed = {witness.layer["mixer"] for witness in WITNESSES.values()} | {case.split("-")[0] for case in LOOPS}
    assert witnessed == set(mixers.names())


@lengths
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", WITNESSES)
@torch.no_grad()
def test_models_equal_those_of_transformers(name, padded, length):
    witness = WITNESSES[name]
    theirs, ours = witness.pair()
    tokens = torch.randint(VOCABULARY, (2, length + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, : length // 3] = 0
    bounds = [(0, length), *((t, t + 1) for t in range(length, length + STEPS))]
    cache, state = None, ours.init_state(2, length + STEPS)
    for first, last in bounds:
        part, real = tokens[:, first:last], mask[:, first:last].bool()
        expected, cache = witness.logits(theirs, part, mask[:, :last], cache)
        logits, state = ours(part, state, real if padded else None)
        assert error(logits[real], expected[real]) < TOLERANCE


def retnet_loop(mixer, w, x):
    heads, width = mixer.n_heads, mixer.head_dim
    q, k, v, z = ((x @ part.T).unflatten(-1, (heads, -1)) for part in w["in_proj.weight"].split(mixer.splits))
    q, k = (torch.complex(*part.chunk(2, dim=-1)) for part in (q, k))  # [T, H, K/2]
    turn = torch.exp(1j * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width))
    decay = torch.tensor([1 - 2.0 ** (-5 - head) for head in range(heads)], dtype=torch.float64)
    state, out = 0, []
    for q_t, k_t, v_t, z_t in zip(q, k, v, z, strict=True):
        state = decay[:, None, None] * turn[:, None] * state + k_t.conj()[..., None] * v_t[:, None]  # [H, K/2, V]
        y = torch.einsum("hk,hkv->hv", q_t, state).real / math.sqrt(width)
        out.append((rms_norm(y, w["norm.weight"].view_as(y)) * F.silu(z_t)).flatten() @ w["out_proj.weight"].T)
    return torch.stack(out)


def gla_loop(mixer, w, x):
    q, k, v, z, low = (x @ part.T for part in w["in_proj.weight"].split(mixer.splits))
    decay = torch.sigmoid(low @ w["decay_proj.weight"].T + w["gate_bias"]) ** (1 / mixer.gate_temperature)
    q, k, v, z, decay = (part.unflatten(-1, (mixer.n_heads, -1)) for part in (q, k, v, z, decay))
    state, out = 0, []
    for q_t, k_t, v_t, z_t, decay_t in zip(q, k, v, z, decay, strict=True):
        state = decay_t[..., None] * state + k_t[..., None] * v_t[:, None]  # [H, K, V]
        y = torch.einsum("hk,hkv->hv", q_t, state) / math.sqrt(mixer.head_dim)
        out.append((rms_norm(y, w["norm.weight"]) * F.silu(z_t)).flatten() @ w["out_proj.weight"].T)
    return torch.stack(out)


def deltanet_loop(mixer, w, x):
    widths = [*mixer.convolved_splits, mixer.n_heads]
    q, k, v, b = (x @ part.T for part in w["in_proj.weight"].split(widths))
    q, k, v = (
        convolved(weight, part).unflatten(-1, (mixer.n_heads, -1))
        for weight, part in zip(w["conv.weight"].split(widths[:3]), (q, k, v), strict=True)
    )
    state, out = torch.zeros(mixer.n_heads, q.shape[-1], v.shape[-1], dtype=torch.float64), []
    for q_t, k_t, v_t, beta in zip(unit(q), unit(k), v, mixer.beta_range * torch.sigmoid(b), strict=True):
        old = torch.einsum("hk,hkv->hv", k_t, state)
        state = state + torch.einsum("h,hk,hv->hkv", beta, k_t, v_t - old)
        y = torch.einsum("hk,hkv->hv", q_t, state) / math.sqrt(q.shape[-1])
        out.append(rms_norm(y, w["norm.weight"]).flatten() @ w["out_proj.weight"].T)
    return torch.stack(out)


def mamba2_loop(mixer, w, x):
    heads, groups = mixer.n_heads, mixer.norm.groups
    z, xbc, dt = (x @ part.T for part in w["in_proj.weight"].split(mixer.splits))
    xbc = F.silu(F.conv1d(F.pad(xbc.T, (3, 0)), w["conv.weight"][:, None], w["conv.bias"], groups=xbc.shape[1]).T)
    u, B, C = xbc.split(mixer.convolved_splits, dim=-1)
    u = u.unflatten(-1, (heads, -1))
    B, C = (part.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for part in (B, C))
    state, out = 0, []
    for u_t, B_t, C_t, dt_t, z_t in zip(u, B, C, F.softplus(dt + w["dt_bias"]), z, strict=True):
        decay = torch.exp(-dt_t * w["A_log"].exp())
        if mixer.negative_eigenvalues:
            decay = 2 * decay - 1
        state = decay[:, None, None] * state + torch.einsum("h,hn,hp->hnp", dt_t, B_t, u_t)
        y = (torch.einsum("hn,hnp->hp", C_t, state) + w["D"][:, None] * u_t).flatten()
        y = y if mixer.norm_before_gate else y * F.silu(z_t)
        y = rms_norm(y.view(groups, -1), w["norm.weight"].view(groups, -1)).flatten()
        out.append((y * F.silu(z_t) if mixer.norm_before_gate else y) @ w["out_proj.weight"].T)
    return torch.stack(out)


LOOPS = {  # by case of cases.py
    "retnet": retnet_loop,
    "gla": gla_loop,
    "deltanet": deltanet_loop,
    "deltanet-negative": deltanet_loop,
    "mamba2-groups": mamba2_loop,
    "mamba2-negative": mamba2_loop,
    **witnesses_linear.LOOPS,
    **witnesses_rwkv_mamba3.LOOPS,
    **witnesses_convolution.LOOPS,
}


@lengths
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", LOOPS)
@torch.no_grad()
def test_mixers_equal_a_loop_written_from_the_paper(case, padded, length):
    mixer = make(case, torch.float32)
    torch.manual_seed(2)
    for parameter in mixer.parameters():
        if parameter.dim() == 1:
            parameter += 0.2 * torch.randn_like(parameter)
    weights = {name: value.double() for name, value in mixer.state_dict().items()}
    x = activations(2, length + STEPS)
    mask = torch.ones(2, length + STEPS, dtype=torch.bool)
    if padded:  # anywhere in the prefill
        mask[:, :length] = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < 0.6
    y, state = mixer(x[:, :length].float(), mixer.init_state(2, length, "cpu", torch.float32), mask[:, :length])
    out = [y]
    for t in range(length, length + STEPS):
        y, state = mixer(x[:, [t]].float(), state)
        out.append(y)
    y = torch.cat(out, 1)
    for row in range(2):
        assert error(y[row, mask[row]], LOOPS[case](mixer, weights, x[row, mask[row]])) < TOLERANCE


@lengths
@torch.no_grad()
def test_a_fixed_decay_equals_lightning_attention_of_minimax(length):
    minimax = import_transformers().models.minimax.modeling_minimax
    config = minimax.MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=2, block_size=16, num_local_experts=1
    )
    torch.manual_seed(0)
    theirs = minimax.MiniMaxLightningAttention(config, layer_idx=0).eval()
    x, cache = activations(2, length + STEPS, dtype=torch.float32), minimax.MiniMaxCache()
    parts = [x[:, :length], *x[:, length:].split(1, 1)]
    expected = torch.cat([theirs(part, None, None, cache=cache)[0] for part in parts], 1)
    q, k, v = F.silu(theirs.qkv_proj(x)).unflatten(-1, (4, -1)).chunk(3, dim=-1)
    y, _ = ops.linear_attention(q, k, v, -theirs.slope_rate.flatten().expand(2, length + STEPS, -1))
    y = theirs.out_proj(torch.sigmoid(theirs.output_gate(x)) * theirs.norm(y.flatten(2)))
    assert error(y, expected) < TOLERANCE
