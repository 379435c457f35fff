"""Other implementations of what our ops and models compute, behind signatures like ours.

The libraries are imported when a function is called, so that a missing one only costs its own rows.
"""

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn.config import ModelConfig
from ssm_trn.model import LanguageModel


def mambapy_selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The parallel scan of mambapy; x, dt [B, T, D], A [D, N], B, C [B, T, N], D [D] -> [B, T, D]."""
    from mambapy.mamba import MambaBlock

    return MambaBlock.selective_scan(None, x, dt, A, B, C, D)


def transformers_selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """What transformers' Mamba runs by default; shapes as above."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    x, dt, B, C = (t.transpose(1, 2) for t in (x, dt, B, C))
    return mamba_selective_scan(x, dt, A, B, C, D).transpose(1, 2)


def transformers_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """transformers' Mamba-2; x [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N] -> [B, T, H, P]."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=Mamba2Config.chunk_size)


def transformers_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """transformers' Qwen3-Next, which scales q by K^-0.5; q, k, v [B, T, H, K], beta, log_decay [B, T, H]."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]


def recurrent_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Gated linear attention as one writes it down first: a loop that indexes each step; all [B, T, H, K]."""
    state = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])  # [B, H, K, V]
    outputs = []
    for t in range(q.shape[1]):
        state = log_decay[:, t, :, :, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, 1)


def mlstm_kernels_chunkwise(q: Tensor, k: Tensor, v: Tensor, write: Tensor, forget: Tensor) -> Tensor:
    """mlstm_kernels' chunkwise form in PyTorch; q, k, v [B, T, H, K], and both gates before activation [B, T, H]."""
    try:
        from mlstm_kernels.torch.chunkwise import mlstm_chunkwise__native_custbw as chunkwise
    except ImportError as error:
        raise ImportError(
            f"{error}; its licence keeps it out of the extras: `pip install --no-deps mlstm_kernels`, if that suits you"
        ) from error
    q, k, v, write, forget = (x.transpose(1, 2).contiguous() for x in (q, k, v, write, forget))
    chunk_size = math.gcd(q.shape[2], 64)  # it must divide the length; 64 is its default
    return chunkwise(q, k, v, write, forget, chunk_size=chunk_size).transpose(1, 2)


def conv1d_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The causal depthwise convolution by PyTorch's own, which wants time last; x [B, T, D], weight [D, W]."""
    channels, taps = weight.shape
    y = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=taps - 1, groups=channels)
    return F.silu(y[..., : x.shape[1]]).transpose(1, 2)


def transformers_model(config: ModelConfig, **options) -> nn.Module:
    """The model of transformers with the layers of `config`: all mamba, all mamba2, or all attention with SwiGLU.

    It has the sizes of the config and otherwise the defaults of our mixers, which are those of the papers.
    """
    import transformers

    (mixer,) = {layer.mixer for layer in config.layers}
    width = {"vocab_size": config.vocab_size, "hidden_size": config.d_model, "num_hidden_layers": len(config.layers)}
    shared = {**width, "tie_word_embeddings": True, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))}
    if options.get("use_mambapy"):
        import mambapy.pscan  # noqa: F401  (without it transformers takes its default path and does not say so)
    if mixer == "mamba":
        own = transformers.MambaConfig(**shared, **options)
        return transformers.MambaForCausalLM(own)
    if mixer == "mamba2":
        heads = {"num_heads": 2 * config.d_model // 64, "n_groups": 1}
        return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**shared, **heads, **options))
    heads = {"num_attention_heads": config.d_model // 64, "intermediate_size": config.d_ff}
    longest = {"max_position_embeddings": 2**14}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared, **heads, **longest, **options))


def with_weights_of(peer: nn.Module, config: ModelConfig) -> LanguageModel:
    """Our model with the weights of a Mamba or Mamba-2 of transformers."""
    model = LanguageModel(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    weights = {_our_name(name): value for name, value in peer.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict({name: value.clone().view(shapes[name]) for name, value in weights.items()})
    return model


def _our_name(name: str) -> str:
    for theirs, ours in (
        (r"^backbone\.embeddings", "embedding"),
        (r"^backbone\.norm_f", "norm"),
        (r"^backbone\.layers\.(\d+)\.norm", r"blocks.\1.mixer_norm"),
        (r"^backbone\.layers", "blocks"),
        (r"conv1d", "conv"),
        (r"dt_proj\.bias", "dt_bias"),
    ):
        name = re.sub(theirs, ours, name)
    return name
