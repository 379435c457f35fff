"""The formats of other projects, a file for each family."""

from ssm_trn.interop.formats import kimi_linear, llama, mamba, olmo_hybrid, qwen3_next, recurrent_gemma
from ssm_trn.interop.mapping import Format

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        mamba.MAMBA,
        mamba.MAMBA2,
        mamba.FALCON_MAMBA,
        mamba.STATE_SPACES_MAMBA,
        mamba.STATE_SPACES_MAMBA2,
        llama.LLAMA,
        recurrent_gemma.RECURRENT_GEMMA,
        qwen3_next.QWEN3_NEXT,
        olmo_hybrid.OLMO_HYBRID,
        kimi_linear.KIMI_LINEAR,
    )
}
