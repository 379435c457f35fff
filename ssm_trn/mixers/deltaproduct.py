"""DeltaProduct: DeltaNet with several writes a token, so that a token can rotate the memory and not only reflect it.

    S_t,0 = alpha_t S_{t-1,n}                                                            per head
    S_t,j = (I - beta_t,j k_t,j k_t,j^T) S_t,j-1 + beta_t,j k_t,j v_t,j^T               j = 1 ... n
    y_t = S_t,n^T q_t / sqrt(K)
    out = W_out RMSNorm(y_t)

with q, and a key, value and beta for each write, as in deltanet.py. `deltaproduct` has no decay, alpha = 1;
`gated_deltaproduct` has the decay and the output gate of gated_deltanet.py. Siems et al. 2025 (arXiv:2502.10297),
section 3. It is `delta_rule` with n steps for each token: the decay at the first of them, the query at the last.

H  n_heads (of values), Hk  n_key_heads, K  head_dim (of keys), V  value_head_dim, n  n_writes
"""

import torch
from torch import Tensor

from ssm_trn.mixers import register
from ssm_trn.mixers.base import require_positive
from ssm_trn.mixers.deltanet import DeltaNet
from ssm_trn.mixers.gated_deltanet import GatedDeltaNet


@register("deltaproduct")
class DeltaProduct(DeltaNet):
    """Options: those of `deltanet`, and
    n_writes: n, writes for each token; the paper's n_h.
    negative_eigenvalues: as in `deltanet`, but on by default: beta = 2 reflects, and a rotation is two reflections.
    """

    def __init__(
        self,
        d_model: int,
        n_writes: int = 2,
        n_heads: int | None = None,
        n_key_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = True,
    ):
        require_positive(n_writes=n_writes)
        self.n_writes = n_writes  # before what needs it
        super().__init__(d_model, n_heads, n_key_heads, head_dim, value_head_dim, conv_width, negative_eigenvalues)

    def recur(self, q, k, v, beta, log_decay, reset, memory):
        k, v, beta = (part.unflatten(2, (self.n_writes, -1)) for part in (k, v, beta))  # [B, T, n, ...]
        if q.shape[1] == 1:  # a decode step: a chunk would be padding for the most part
            for write in zip(k.unbind(2), v.unbind(2), beta.unbind(2), strict=True):
                y, memory = super().recur(q, *write, log_decay, reset, memory)
                log_decay = reset = None
            return y, memory
        k, v, beta = (part.flatten(1, 2) for part in (k, v, beta))  # [B, T n, ...]
        q, log_decay, reset = self.at_write(-1, q), self.at_write(0, log_decay), self.at_write(0, reset)
        y, memory = super().recur(q, k, v, beta, log_decay, reset, memory)
        return y[:, self.n_writes - 1 :: self.n_writes], memory

    def at_write(self, index: int, x: Tensor | None) -> Tensor | None:
        """x [B, T, ...] of the tokens at one of their writes and 0 at the others, [B, T n, ...]."""
        if x is None:
            return None
        writes = [torch.zeros_like(x)] * self.n_writes
        writes[index] = x
        return torch.stack(writes, 2).flatten(1, 2)


@register("gated_deltaproduct")
class GatedDeltaProduct(DeltaProduct, GatedDeltaNet):
    """Options: those of `deltaproduct`."""
