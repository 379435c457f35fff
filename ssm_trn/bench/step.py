"""Language models of 10 million parameters beside those of transformers: training steps and decoding, in float32."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssm_trn.bench import peers
from ssm_trn.bench.measure import OURS, Comparison, Side, Target
from ssm_trn.config import ModelConfig
from ssm_trn.matching import match_parameters
from ssm_trn.model import LanguageModel

PARAMETERS = 9_850_000  # all models are within 1 % of it
VOCABULARY, WIDTH, BLOCKS = 4096, 320, 6
PAPER_SIZES = {"mamba": (12, 328), "mamba2": (12, 320)}  # blocks and width of the models without feed-forward layers
DECODED_TOKENS = 32

# What is compared with Llama: mixer, and whether a feed-forward layer follows it in each block.
RIVALS = {
    "Mamba, paper's block (no feed-forward)": ("mamba", False),
    "Mamba, with feed-forward": ("mamba", True),
    "Mamba-2, paper's block (no feed-forward)": ("mamba2", False),
    "Mamba-2, with feed-forward": ("mamba2", True),
    "gated DeltaNet, with feed-forward": ("gated_deltanet", True),
}


def model_config(mixer: str, feed_forward: bool = True) -> ModelConfig:
    """A model of 10 million parameters: blocks of the mixer and SwiGLU, as `layers: [mixer]` gives them, or, of Mamba
    and Mamba-2, the blocks of their papers, which are the mixer alone.
    """
    if feed_forward:
        return match_parameters(ModelConfig(VOCABULARY, WIDTH, [mixer] * BLOCKS), PARAMETERS)
    blocks, width = PAPER_SIZES[mixer]
    return ModelConfig(VOCABULARY, width, [{"mixer": mixer, "feed_forward": "none"}] * blocks)


def train_beside_twin(name: str, length: int, config: ModelConfig | None = None) -> dict[str, Side]:
    """Training steps of our model and of the same one of transformers, from the same weights."""
    peer, ours = twins(config or model_config(name, feed_forward=False))
    tokens = torch.randint(ours.config.vocab_size, (1, length + 1))
    return {
        OURS: training_side(ours, lambda tokens: ours(tokens)[0], tokens),
        "transformers": training_side(peer, lambda tokens: peer(tokens, use_cache=False).logits, tokens),
    }


def train_beside_llama(names: Sequence[str], length: int) -> dict[str, Side]:
    llama = peers.transformers_model(model_config("attention"))
    models = {name: LanguageModel(model_config(*RIVALS[name])) for name in names}
    tokens = torch.randint(VOCABULARY, (1, length + 1))
    sides = {"Llama": training_side(llama, lambda tokens: llama(tokens, use_cache=False).logits, tokens)}
    for name, model in models.items():
        sides[name] = training_side(model, lambda tokens, model=model: model(tokens)[0], tokens)
    return sides


def training_side(model: nn.Module, logits_of: Callable[[Tensor], Tensor], tokens: Tensor) -> Side:
    """Steps of forward, loss, backward and AdamW on tokens [B, T + 1]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> Iterable[Tensor]:
        logits = logits_of(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [logits.detach()]

    return Side(step, parameter_count(model))


def decode_beside_twin(name: str, length: int, config: ModelConfig | None = None) -> dict[str, Side]:
    peer, ours = twins(config or model_config(name, feed_forward=False))
    context = torch.randint(ours.config.vocab_size, (1, length))
    return {OURS: decoding_side(ours, context), "transformers": peer_decoding_side(peer, context)}


def decode_beside_llama(names: Sequence[str], length: int) -> dict[str, Side]:
    context = torch.randint(VOCABULARY, (1, length))
    sides = {"Llama": peer_decoding_side(peers.transformers_model(model_config("attention")), context)}
    return sides | {name: decoding_side(LanguageModel(model_config(*RIVALS[name])), context) for name in names}


@torch.inference_mode()
def decoding_side(model: LanguageModel, context: Tensor) -> Side:
    """Greedy decoding behind the context; each call starts there."""
    _, after_context = model.features(context, model.init_state(1, context.shape[1] + DECODED_TOKENS))

    @torch.inference_mode()
    def decode() -> Iterable[Tensor]:
        token, state = context[:, -1:], after_context
        for _ in range(DECODED_TOKENS):
            logits, state = model(token, state)
            token = logits.argmax(-1)
        return [logits]

    return Side(decode, parameter_count(model))


@torch.inference_mode()
def peer_decoding_side(model: nn.Module, context: Tensor) -> Side:
    """The same for a model of transformers; if it is recurrent, only its first call starts behind the context.

    Recurrent states are changed in place and cannot go back, but a step costs the same wherever it starts.
    """
    model.eval()
    cache = model(context, use_cache=True, logits_to_keep=1).cache

    @torch.inference_mode()
    def decode() -> Iterable[Tensor]:
        token = context[:, -1:]
        for _ in range(DECODED_TOKENS):
            logits = model(token, cache=cache, use_cache=True).logits
            token = logits.argmax(-1)
        if hasattr(model.config, "num_attention_heads"):
            cache.crop(-DECODED_TOKENS)
        return [logits]

    return Side(decode, parameter_count(model))


def twins(config: ModelConfig) -> tuple[nn.Module, LanguageModel]:
    """A Mamba or Mamba-2 of transformers, and ours with its weights."""
    options = {"use_mambapy": True} if config.layers[0].mixer == "mamba" else {}
    peer = peers.transformers_model(config, **options)
    return peer, peers.with_weights_of(peer, config)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _against_llama(title: str, ratio: float) -> tuple[Target, ...]:
    return tuple(Target(f"{title}, {name}", "Llama", ratio, ours=name) for name in RIVALS)


STEPS = {
    "train_mamba": Comparison(
        partial(train_beside_twin, "mamba"),
        length=2048,
        rounds=5,
        targets=(Target("training step, Mamba", "transformers", 3.3),),
    ),
    "train_mamba2": Comparison(
        partial(train_beside_twin, "mamba2"),
        length=2048,
        rounds=5,
        targets=(Target("training step, Mamba-2", "transformers", 1.8),),
    ),
    "train_short": Comparison(
        partial(train_beside_llama, tuple(RIVALS)),
        length=512,
        rounds=7,
        targets=_against_llama("training step", 0.7),
        same=False,
    ),
    "train_long": Comparison(
        partial(train_beside_llama, tuple(RIVALS)),
        length=4096,
        rounds=3,
        targets=_against_llama("training step", 1.0),
        same=False,
    ),
    "decode_mamba": Comparison(
        partial(decode_beside_twin, "mamba"),
        length=1024,
        rounds=9,
        targets=(Target("decoding, Mamba", "transformers", 1.6),),
    ),
    "decode_long": Comparison(
        partial(decode_beside_llama, tuple(RIVALS)),
        length=8192,
        rounds=7,
        targets=_against_llama("decoding", 5),
        same=False,
    ),
}
