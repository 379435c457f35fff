"""LRU, S4D, Hyena and mLSTM as their papers define them, and mLSTM as transformers computes it.

Each takes a mixer (for its sizes), its weights and one row x [T, d_model], all in float64, and returns the output.
"""

import math

import torch
import torch.nn.functional as F

from .witnesses import import_transformers


def glu(w, y):
    """The output of an S4 block: gelu, then a linear layer whose second half gates the first."""
    value, gate = (F.gelu(y) @ w["out_proj.weight"].T).chunk(2, dim=-1)
    return value * torch.sigmoid(gate)


def lru(mixer, w, x):
    """Orvieto et al. 2023, equations 2 to 7: complex vectors and matrices, one step at a time."""
    B = torch.complex(*w["in_proj.weight"].chunk(2)) * w["gamma_log"].exp()[:, None]  # [N, d_model]
    C_real, minus_C_imag = w["read_proj.weight"].chunk(2, dim=1)
    C = torch.complex(C_real, -minus_C_imag)
    eigenvalues = torch.polar(torch.exp(-w["nu_log"].exp()), w["theta_log"].exp())
    h, out = torch.zeros_like(eigenvalues), []
    for x_t in x:
        h = eigenvalues * h + B @ x_t.to(B.dtype)
        out.append((C @ h).real + w["D"] * x_t)
    return glu(w, torch.stack(out))


def s4d(mixer, w, x):
    """Gu et al. 2022, equations 1 and 2 under zero-order hold, with each complex state's conjugate beside it."""
    dt = w["dt_log"].exp()[:, None]
    A = -w["A_log"].exp().to(torch.complex128)
    C = w["C"].to(A.dtype) if mixer.init == "real" else torch.complex(*w["C"].unbind(-1))
    if mixer.init != "real":
        A = A + 1j * w["A_imag"]
        A, C = torch.cat([A, A.conj()], 1), torch.cat([C, C.conj()], 1)  # [d_model, d_state]
    decay = torch.exp(dt * A)
    B = (decay - 1) / A
    h, out = torch.zeros_like(A), []
    for x_t in x:
        h = decay * h + B * x_t[:, None]
        y = (C * h).sum(1)
        assert y.imag.norm() <= 1e-9 * y.real.norm()
        out.append(y.real + w["D"] * x_t)
    return glu(w, torch.stack(out))


def hyena(mixer, w, x):
    """Poli et al. 2023, section 3: the matrix of each gate and of the filter, multiplied out."""
    length, taps = len(x), w["conv.weight"].shape[1]
    padded = F.pad(x @ w["in_proj.weight"].T, (0, 0, taps - 1, 0))
    convolved = w["conv.bias"] + sum(w["conv.weight"][:, i] * padded[i : i + length] for i in range(taps))
    q, k, v = convolved.chunk(3, dim=-1)

    time = torch.arange(length).double()[:, None] / mixer.filter.context_length
    bands = torch.linspace(1e-4, mixer.filter.bands - 1, mixer.filter.bands, dtype=torch.float64)
    phases = torch.exp(-2j * math.pi * bands * time)
    z, sine = torch.cat([time, phases.real, phases.imag], 1), w["filter.frequency"]
    weights = [w["filter.in_weight"], *w["filter.hidden_weight"]]
    for weight, bias in zip(weights, w["filter.biases"], strict=True):
        z = torch.sin(sine * (z @ weight.T + bias))
    steepness = torch.linspace(1 / 1.5, 1 / 0.3, x.shape[1], dtype=torch.float64)
    kernel = 0.01 ** (time * steepness) * (z @ w["filter.out_weight"].T)  # [T, d_model]

    lags = torch.arange(length)[:, None] - torch.arange(length)
    toeplitz = kernel.T[:, lags.clamp(min=0)].tril()  # [d_model, T, T]
    y = q * (torch.einsum("dts,sd->td", toeplitz, k * v) + w["D"] * k * v)
    return y @ w["out_proj.weight"].T


def mlstm(mixer, w, x):
    """Beck et al. 2024, equations 19 to 27 as they stand, without the stabiliser that float64 does not need."""
    heads, width = mixer.n_heads, mixer.head_dim
    q, k, v, o = ((x @ part.T).unflatten(-1, (heads, -1)) for part in w["in_proj.weight"].split(mixer.splits))
    i, f = (x @ w["gate_proj.weight"].T + w["gate_bias"]).chunk(2, dim=-1)
    C, n, out = 0, 0, []
    for t in range(len(x)):
        forget, write = torch.sigmoid(f[t])[:, None], torch.exp(i[t])[:, None]
        C = forget[..., None] * C + (write * k[t] / math.sqrt(width))[..., None] * v[t][:, None]  # [H, K, V]
        n = forget * n + write * k[t] / math.sqrt(width)
        divisor = torch.einsum("hk,hk->h", n, q[t]).abs().clamp(min=1)
        h = torch.einsum("hk,hkv->hv", q[t], C) / divisor[:, None]
        centred = h - h.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        out.append((normed.flatten() * w["norm_weight"] * torch.sigmoid(o[t]).flatten()) @ w["out_proj.weight"].T)
    return torch.stack(out)


def xlstm(mixer, w, x):
    """The layer of transformers' xLSTM, which keeps part of its state in float32 whatever its weights are."""
    theirs = import_transformers().models.xlstm.modeling_xlstm
    config = theirs.xLSTMConfig(
        hidden_size=x.shape[-1],
        num_heads=mixer.n_heads,
        num_hidden_layers=1,
        qk_dim_factor=mixer.n_heads * mixer.head_dim / x.shape[-1],
        gate_soft_cap=mixer.gate_soft_cap,
        norm_reduction_force_float32=False,
    )
    layer = theirs.xLSTMLayer(config).double()
    projections = zip(("q", "k", "v", "ogate_preact"), w["in_proj.weight"].split(mixer.splits), strict=True)
    weights = {f"{name}.weight": weight for name, weight in projections}
    for name, weight, bias in zip("if", w["gate_proj.weight"].chunk(2), w["gate_bias"].chunk(2), strict=True):
        weights |= {f"{name}gate_preact.weight": weight, f"{name}gate_preact.bias": bias}
    weights |= {"multihead_norm.weight": w["norm_weight"], "out_proj.weight": w["out_proj.weight"]}
    layer.load_state_dict(weights)
    return layer(x[None])[0][0]


LOOPS = {  # by case of cases.py
    "lru": lru,
    "s4d": s4d,
    "s4d-inv": s4d,
    "s4d-real": s4d,
    "hyena": hyena,
    "mlstm": xlstm,
    "mlstm-uncapped": mlstm,
}
