"""RWKV-6, RWKV-7 and Mamba-3 as plain loops over tokens, written from their papers: one row x [T, d_model], float64."""

import math

import torch
import torch.nn.functional as F

from .loops import rms_norm


def lerp(a, b, mu):
    """From a towards b."""
    return a + (b - a) * mu


def heads_normed(y, mixer, w):
    """The layer norm of each head of y [H, V], with its weight and bias."""
    deviation = y - y.mean(-1, keepdim=True)
    normed = deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5 * mixer.head_dim).sqrt()
    return normed.flatten() * w["norm.weight"] + w["norm.bias"]


def rwkv6_loop(mixer, w, x):
    """Equations 14 to 22 of arXiv:2404.05892, heads apart; matrices act from the left."""
    mu_x, *mu = w["shift"].chunk(6)
    down, up = w["shift_down.weight"].chunk(5), [w[f"shift_up.{p}.weight"] for p in range(5)]
    heads, u = mixer.n_heads, w["bonus"].view(mixer.n_heads, -1)
    s, previous, out = torch.zeros(heads, u.shape[1], u.shape[1], dtype=torch.float64), torch.zeros_like(x[0]), []
    for x_t in x:
        lean = [  # ddlerp, for d, k, v, r, g
            lerp(x_t, previous, mu[p] + up[p] @ torch.tanh(down[p] @ lerp(x_t, previous, mu_x))) for p in range(5)
        ]
        d = w["decay_bias"] + w["decay_proj.2.weight"] @ torch.tanh(w["decay_proj.0.weight"] @ lean[0])
        k, v, r, g = (w[f"{name}_proj.weight"] @ lean[1 + i] for i, name in enumerate("kvrg"))
        decay, k, v, r = (part.view(heads, -1) for part in (torch.exp(-torch.exp(d)), k, v, r))
        kv = k[:, :, None] * v[:, None]  # [H, K, V]
        y = torch.einsum("hk,hkv->hv", r, s + u[..., None] * kv)
        s = decay[..., None] * s + kv
        out.append(w["out_proj.weight"] @ (F.silu(g) * heads_normed(y, mixer, w)))
        previous = x_t
    return torch.stack(out)


def rwkv7_loop(mixer, w, x):
    """Equations 3 to 22 of arXiv:2503.14456 for a first layer, without value residual; the state is wkv [H, V, K]."""
    heads, mu, rho = mixer.n_heads, w["shift"].chunk(6), w["rho"].view(mixer.n_heads, -1)
    wkv, previous, out = torch.zeros(heads, rho.shape[1], rho.shape[1], dtype=torch.float64), torch.zeros_like(x[0]), []
    for x_t in x:
        x_r, x_k, x_v, x_d, x_a, x_g = (lerp(x_t, previous, m) for m in mu)
        a = torch.sigmoid(w["rate_bias"] + w["rate_proj.2.weight"] @ w["rate_proj.0.weight"] @ x_a)
        d = w["decay_bias"] + w["decay_proj.2.weight"] @ torch.tanh(w["decay_proj.0.weight"] @ x_d)
        g = w["gate_proj.2.weight"] @ torch.sigmoid(w["gate_proj.0.weight"] @ x_g)
        r, k, v = w["r_proj.weight"] @ x_r, w["k_proj.weight"] @ x_k, w["v_proj.weight"] @ x_v
        decay, kappa, replacement = (
            torch.exp(-math.exp(-0.5) * torch.sigmoid(d)),
            k * w["xi"],
            k * lerp(1, a, w["alpha"]),
        )
        a, decay, kappa, replacement, r, v = (part.view(heads, -1) for part in (a, decay, kappa, replacement, r, v))
        kappa = kappa / kappa.norm(dim=-1, keepdim=True)
        transition = torch.diag_embed(decay) - kappa[:, :, None] * (a * kappa)[:, None]  # [H, K, K]
        wkv = wkv @ transition + v[:, :, None] * replacement[:, None]
        y = torch.einsum("hvk,hk->hv", wkv, r)
        bonus = (r * rho * replacement).sum(-1, keepdim=True) * v
        out.append(w["out_proj.weight"] @ (g * (heads_normed(y, mixer, w) + bonus.flatten())))
        previous = x_t
    return torch.stack(out)


def mamba3_loop(mixer, w, x):
    """Proposition 1 of arXiv:2603.15569 with a complex state: the pairs of rows that turn are complex numbers."""
    heads, angles = mixer.n_heads, mixer.n_angles
    z, u, B, C, dt, A, trapezoid, angle = (w["in_proj.weight"] @ x.T).T.split(mixer.splits, dim=-1)

    def normed(part, name):
        groups = rms_norm(part.unflatten(-1, (-1, mixer.d_state)), w[f"{name}_norm.weight"])
        shared = groups.repeat_interleave(heads // groups.shape[1], 1)  # [T, H, N]
        return torch.view_as_complex((shared + w[f"{name}_bias"].view(heads, -1)).unflatten(-1, (-1, 2)))

    u, B, C = u.unflatten(-1, (heads, -1)), normed(B, "B"), normed(C, "C")
    dt, A, share = F.softplus(dt + w["dt_bias"]), -F.softplus(A).clamp(min=1e-4), torch.sigmoid(trapezoid)
    speed = F.pad(math.pi * torch.tanh(angle), (0, mixer.d_state // 2 - angles))  # [T, N/2]
    h, written, out = 0, 0, []
    for t in range(len(x)):
        # h' = (A - i speed) h + B u over a time dt: all that was there decays and turns
        transition = torch.exp(dt[t, :, None] * (A[t, :, None] - 1j * speed[t]))[..., None]  # [H, N/2, 1]
        before, written = written, B[t, :, :, None] * u[t, :, None]
        dt_t, share_t = dt[t, :, None, None], share[t, :, None, None]
        h = transition * h + (1 - share_t) * dt_t * transition * before + share_t * dt_t * written
        y = (C[t, :, :, None].conj() * h).sum(1).real + w["D"][:, None] * u[t]
        out.append(w["out_proj.weight"] @ (y.flatten() * F.silu(z[t])))
    return torch.stack(out)


LOOPS = {"rwkv6": rwkv6_loop, "rwkv7": rwkv7_loop, "mamba3": mamba3_loop, "mamba3-groups": mamba3_loop}  # by case
