"""Inside the chunks of the delta rule: the passes from one chunk to the next, and the weights that they need.

delta_rule.py has the equations. Shapes: N chunks of C steps; everything is [N, B H, C, channels].
"""

import torch
from torch import Tensor

from ssm_trn.ops.chunks import ChannelDecays, HeadDecays, decay_of
from ssm_trn.ops.contexts import one_thread


class Chunks:
    """Passes through some chunks: forward from the state that enters the first, backward from the gradient of the state
    that leaves the last.
    """

    def __init__(self, inputs: list[Tensor], scale: float, decay_first: bool, keep: bool):
        """q, r, w, log_decay, y, beta; `keep` what the backward pass needs."""
        q, r, w, log_decay, self.y, self.beta = inputs
        self.r, self.scale = r, scale
        r = self.beta * r
        self.weights: _HeadWeights | _ChannelWeights
        if log_decay.shape[-1] == 1 and decay_first:
            self.weights = _HeadWeights(q * scale, r, w, log_decay)
        else:
            self.weights = _ChannelWeights(q * scale, r, w, log_decay, decay_first, keep)

    @one_thread()
    def forward(self, state: Tensor, z: Tensor | None, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """o and the state that leaves the last chunk; z and the states that enter the chunks where there is room."""
        weights, known = self.weights, self.beta * self.y
        out, z = torch.empty_like(known), torch.empty_like(known) if z is None else z
        for n in range(len(out)):
            if entering is not None:
                entering[n] = state
            rest = torch.baddbmm(known[n], weights.read_z[n], state, alpha=-1)
            # The solver looks below the diagonal only.
            torch.linalg.solve_triangular(weights.system[n], rest, upper=False, unitriangular=True, out=z[n])
            torch.bmm(weights.read_q[n], state, out=out[n]).baddbmm_(weights.mix[n], z[n])
            state = (weights.total[n] * state).baddbmm_(weights.write[n].mT, z[n])
        return out, state

    def backward(self, grad_out: Tensor, grad_state: Tensor, z: Tensor, entering: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, r, w, log_decay, y, beta, and of the state that enters the first chunk."""
        weights = self.weights
        grad_y, leaving = torch.empty_like(z), torch.empty_like(entering)  # gradients of the states that leave chunks
        with one_thread():
            for n in reversed(range(len(z))):
                leaving[n] = grad_state
                grad_z = torch.bmm(weights.mix[n].mT, grad_out[n]).baddbmm_(weights.write[n], grad_state)
                system = weights.system[n].mT
                torch.linalg.solve_triangular(system, grad_z, upper=True, unitriangular=True, out=grad_y[n])
                grad_state = (weights.total[n] * grad_state).baddbmm_(weights.read_q[n].mT, grad_out[n])
                grad_state.baddbmm_(weights.read_z[n].mT, grad_y[n], alpha=-1)
        grad_q, grad_r, grad_w, grad_log_decay = weights.backward(
            grad_system=(grad_y @ z.mT).tril_(-1).neg_(),
            grad_read_z=(grad_y @ entering.mT).neg_(),
            grad_mix=grad_out @ z.mT,
            grad_read_q=grad_out @ entering.mT,
            grad_write=z @ leaving.mT,
            grad_total=(leaving * entering).sum(-1, keepdim=True) * weights.total,
        )
        grad_beta = (grad_r * self.r).sum(-1, keepdim=True) + (grad_y * self.y).sum(-1, keepdim=True)
        grad_q, grad_r, grad_y = grad_q * self.scale, grad_r * self.beta, grad_y * self.beta
        return grad_q, grad_r, grad_w, grad_log_decay, grad_y, grad_beta, grad_state


class _HeadWeights:
    """What the passes through chunks need, under decays per head.

    Attributes:
        system, mix: r_t^T D_ts w_s and q_t^T D_ts w_s [N, B H, C, C].
        read_z, read_q, write: r and q decayed from the start of the chunk, w decayed to its end [N, B H, C, K].
        total: decay of the whole chunk [N, B H, 1, 1].
    """

    def __init__(self, q: Tensor, r: Tensor, w: Tensor, log_decay: Tensor):
        self.q, self.r, self.w = q, r, w
        self.decays = HeadDecays(log_decay.squeeze(-1))
        self.start, self.end = self.decays.start[..., None], self.decays.end[..., None]
        self.system, self.mix = ((x @ w.mT).mul_(self.decays.pairs) for x in (r, q))
        self.read_z, self.read_q, self.write = r * self.start, q * self.start, w * self.end
        self.total = self.start[..., -1:, :]

    def backward(self, grad_system, grad_read_z, grad_mix, grad_read_q, grad_write, grad_total) -> tuple[Tensor, ...]:
        """The gradients of q, r, w and log_decay; `grad_total` is that of the logarithm of total [N, B H, K, 1]."""
        grad_pairs = (grad_system * self.system).addcmul_(grad_mix, self.mix)
        grad_start = (grad_read_z * self.read_z).addcmul_(grad_read_q, self.read_q).sum(-1)
        grad_start[..., -1] += grad_total.sum((-1, -2))
        grad_log_decay = self.decays.backward(grad_pairs, grad_start, (grad_write * self.write).sum(-1))
        grad_z_scores, grad_q_scores = grad_system * self.decays.pairs, grad_mix * self.decays.pairs
        grad_q = (grad_q_scores @ self.w).addcmul_(grad_read_q, self.start)
        grad_r = (grad_z_scores @ self.w).addcmul_(grad_read_z, self.start)
        grad_w = (grad_z_scores.mT @ self.r).addcmul_(grad_write, self.end) + grad_q_scores.mT @ self.q
        return grad_q, grad_r, grad_w, grad_log_decay[..., None]


class _ChannelWeights:
    """The same under decays per channel; total is [N, B H, K, 1]."""

    def __init__(self, q: Tensor, r: Tensor, w: Tensor, log_decay: Tensor, decay_first: bool, keep: bool):
        self.q, self.w, self.decay_first = q, w, decay_first
        self.own = decay_of(log_decay)
        self.readers = [r * self.own if decay_first else r, q * self.own]
        self.decays = ChannelDecays(self.readers, [w], log_decay, keep)
        (self.read_z, self.read_q), (self.write,) = self.decays.readers, self.decays.writers
        (self.system,), (self.mix,) = self.decays.products
        self.mix.diagonal(dim1=-2, dim2=-1).copy_((q * w).sum(-1))
        self.total = self.decays.total.mT

    def backward(self, grad_system, grad_read_z, grad_mix, grad_read_q, grad_write, grad_total) -> tuple[Tensor, ...]:
        """The gradients of q, r, w and log_decay; `grad_total` is that of the logarithm of total."""
        (grad_r, grad_q), (grad_w,), grad_log_decay = self.decays.backward(
            [grad_read_z, grad_read_q], [grad_write], [[grad_system], [grad_mix]], grad_total.mT
        )
        grad_log_decay.addcmul_(grad_q, self.readers[1])
        if self.decay_first:
            grad_log_decay.addcmul_(grad_r, self.readers[0])
            grad_r = grad_r * self.own
        present = grad_mix.diagonal(dim1=-2, dim2=-1)[..., None]
        grad_q = (grad_q * self.own).addcmul_(present, self.w)
        return grad_q, grad_r, grad_w.addcmul_(present, self.q), grad_log_decay
