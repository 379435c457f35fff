"""Linear attention, Based, HGRN2 and DeltaProduct as their papers define them, and RG-LRU as transformers computes it.

Each takes a mixer (for its sizes), its weights and one row x [T, d_model], all in float64, and returns the output.
"""

import math

import torch
import torch.nn.functional as F

from .loops import convolved, rms_norm, unit
from .witnesses import import_transformers


def kernel_attention(mixer, w, x, kernel):
    """Every token's sum over all tokens up to it, weighed by kernel(q, k) (Katharopoulos et al. 2020, equation 8)."""
    projected = (x @ part.T for part in w["in_proj.weight"].split(mixer.splits))
    q, k, v = (part.unflatten(-1, (mixer.n_heads, -1)).transpose(0, 1) for part in projected)  # [H, T, channels]
    weights = kernel(q, k).tril()
    y = weights @ v / weights.sum(-1, keepdim=True)
    return y.transpose(0, 1).flatten(1) @ w["out_proj.weight"].T


def linear_attention(mixer, w, x):
    return kernel_attention(mixer, w, x, lambda q, k: (F.elu(q) + 1) @ (F.elu(k) + 1).mT)


def based(mixer, w, x):
    def kernel(q, k):
        scores = q @ k.mT / math.sqrt(mixer.head_dim)
        return 1 + scores + scores**2 / 2

    return kernel_attention(mixer, w, x, kernel)


def hgrn2(mixer, w, x):
    q, f, v = (x @ part.T for part in w["in_proj.weight"].chunk(3))
    bound = torch.sigmoid(w["gamma_logit"]) if "gamma_logit" in w else 0.0
    forget = bound + (1 - bound) * torch.sigmoid(f)
    q, forget, v = (part.unflatten(-1, (mixer.n_heads, -1)) for part in (F.silu(q), forget, v))
    state, out = 0, []
    for q_t, f_t, v_t in zip(q, forget, v, strict=True):
        state = f_t[..., None] * state + (1 - f_t)[..., None] * v_t[:, None]  # [H, K, V]
        y = torch.einsum("hk,hkv->hv", q_t, state).flatten()
        out.append(rms_norm(y, w["norm.weight"]) @ w["out_proj.weight"].T)
    return torch.stack(out)


def deltaproduct(mixer, w, x):
    """Siems et al. 2025, section 3: a product of matrices I - beta k k^T for each token."""
    heads, writes, width = mixer.n_heads, mixer.n_writes, mixer.head_dim
    convolved_part, b, *gates = (x @ part.T for part in w["in_proj.weight"].split(mixer.splits))
    q, k, v = convolved(w["conv.weight"], convolved_part).split(mixer.convolved_splits, -1)
    q, k = unit(q.unflatten(-1, (-1, width))), unit(k.unflatten(-1, (writes, -1, width)))
    q, k = (part.repeat_interleave(heads // part.shape[-2], -2) for part in (q, k))  # [T, H, K], [T, n, H, K]
    v, beta = v.unflatten(-1, (writes, heads, -1)), mixer.beta_range * torch.sigmoid(b).unflatten(-1, (writes, heads))
    state, identity, out = torch.zeros(heads, width, v.shape[-1]).double(), torch.eye(width).double(), []
    for t in range(len(x)):
        if gates:
            step = F.softplus(gates[0][t] + w["dt_bias"])
            state = torch.exp(-step * w["A_log"].exp())[:, None, None] * state
        for k_j, v_j, beta_j in zip(k[t], v[t], beta[t][..., None, None], strict=True):
            transition = identity - beta_j * k_j[:, :, None] * k_j[:, None]  # [H, K, K]
            state = transition @ state + beta_j * k_j[:, :, None] * v_j[:, None]
        y = rms_norm((q[t][:, None] @ state)[:, 0] / math.sqrt(width), w["norm.weight"]).flatten()
        out.append((y * F.silu(gates[1][t]) if gates else y) @ w["out_proj.weight"].T)
    return torch.stack(out)


def rg_lru(mixer, w, x):
    """RecurrentGemma's block; it scans in float32 whatever its weights are."""
    theirs = import_transformers().models.recurrent_gemma.modeling_recurrent_gemma
    (heads, _, _), (channels,) = w["input_gate.weight"].shape, w["Lambda"].shape
    config = theirs.RecurrentGemmaConfig(
        hidden_size=x.shape[-1],
        num_attention_heads=heads,
        lru_width=channels,
        conv1d_width=w["conv.weight"].shape[1],
        num_hidden_layers=1,
    )
    block = theirs.RecurrentGemmaRecurrentBlock(config, layer_idx=0).double()
    (x_weight, y_weight), (x_bias, y_bias) = w["in_proj.weight"].chunk(2), w["in_proj.bias"].chunk(2)
    weights = {
        "linear_x.weight": x_weight,
        "linear_x.bias": x_bias,
        "linear_y.weight": y_weight,
        "linear_y.bias": y_bias,
        "linear_out.weight": w["out_proj.weight"],
        "linear_out.bias": w["out_proj.bias"],
        "conv_1d.weight": w["conv.weight"][:, None],
        "conv_1d.bias": w["conv.bias"],
        "rg_lru.recurrent_param": w["Lambda"],
        "rg_lru.input_gate_weight": w["input_gate.weight"],
        "rg_lru.input_gate_bias": w["input_gate.bias"].unflatten(0, (heads, -1)),
        "rg_lru.recurrent_gate_weight": w["recurrence_gate.weight"],
        "rg_lru.recurrent_gate_bias": w["recurrence_gate.bias"].unflatten(0, (heads, -1)),
    }
    block.load_state_dict(weights)
    return block(x[None], torch.arange(len(x))[None], attention_mask=None, use_cache=False)[0][0]


LOOPS = {  # by case of cases.py
    "linear_attention": linear_attention,
    "based": based,
    "hgrn2": hgrn2,
    "hgrn2-bounded": hgrn2,
    "deltaproduct": deltaproduct,
    "deltaproduct-positive": deltaproduct,
    "gated_deltaproduct": deltaproduct,
    "rg_lru": rg_lru,
    "rg_lru-wide": rg_lru,
}
