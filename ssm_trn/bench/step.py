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

PARAMETERS = 9_930_000  # all models are within 2 % of it
VOCABULARY, WIDTH = 4096, 320
DECODED_TOKENS = 32


def model_config(name: str) -> ModelConfig:
    """Mamba and Mamba-2 as in their papers, without feed-forward layers and so with twice as many blocks."""
    if name in ("mamba", "mamba2"):
        layers = [{"mixer": name, "feed_forward": "none"}] * {"mamba": 13, "mamba2": 12}[name]
        return ModelConfig(VOCABULARY, WIDTH, layers)
    return match_parameters(ModelConfig(VOCABULARY, WIDTH, [name] * 6), PARAMETERS)


def train_beside_twin(name: str, length: int, config: ModelConfig | None = None) -> dict[str, Side]:
    """Training steps of our model and of the same one of transformers, from the same weights."""
    peer, ours = twins(config or model_config(name))
    tokens = torch.randint(ours.config.vocab_size, (1, length + 1))
    return {
        OURS: training_side(ours, lambda tokens: ours(tokens)[0], tokens),
        "transformers": training_side(peer, lambda tokens: peer(tokens, use_cache=False).logits, tokens),
    }


def train_beside_llama(names: Sequence[str], length: int) -> dict[str, Side]:
    llama = peers.transformers_model(model_config("attention"))
    models = {name: LanguageModel(model_config(name)) for name in names}
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
    peer, ours = twins(config or model_config(name))
    context = torch.randint(ours.config.vocab_size, (1, length))
    return {OURS: decoding_side(ours, context), "transformers": peer_decoding_side(peer, context)}


def decode_beside_llama(names: Sequence[str], length: int) -> dict[str, Side]:
    context = torch.randint(VOCABULARY, (1, length))
    sides = {"Llama": peer_decoding_side(peers.transformers_model(model_config("attention")), context)}
    return sides | {name: decoding_side(LanguageModel(model_config(name)), context) for name in names}


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


NAMES = {"mamba": "Mamba", "mamba2": "Mamba-2", "gated_deltanet": "gated DeltaNet"}


def _against_llama(title: str, ratio: float) -> tuple[Target, ...]:
    return tuple(Target(f"{title}, {name}", "Llama", ratio, ours=key) for key, name in NAMES.items())


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
        partial(train_beside_llama, tuple(NAMES)),
        length=512,
        rounds=7,
        targets=_against_llama("training step", 0.7),
        same=False,
    ),
    "train_long": Comparison(
        partial(train_beside_llama, tuple(NAMES)),
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
        partial(decode_beside_llama, tuple(NAMES)),
        length=8192,
        rounds=7,
        targets=_against_llama("decoding", 5),
        same=False,
    ),
}
