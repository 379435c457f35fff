"""The mathematics of the family: pure functions, tensors in, (output, state) out.

Layout is [batch, time, heads, dim]. Every op takes a state and returns one, for any number of steps, so that training,
prefill, a chunk of a long prompt and one decode step are the same call.
"""

from ssm_trn.ops.attention import attention
from ssm_trn.ops.backends import use_backend
from ssm_trn.ops.delta_rule import delta_rule
from ssm_trn.ops.linear_attention import linear_attention
from ssm_trn.ops.long_conv import long_conv
from ssm_trn.ops.masking import pass_through
from ssm_trn.ops.packing import resets_from
from ssm_trn.ops.selective_scan import selective_scan
from ssm_trn.ops.short_conv import short_conv

__all__ = [
    "attention",
    "delta_rule",
    "linear_attention",
    "long_conv",
    "pass_through",
    "resets_from",
    "selective_scan",
    "short_conv",
    "use_backend",
]
