"""One language model for every mixer and every mixture of them.

x = embedding(tokens)
for each block:  x = x + mixer(norm(x));  x = x + feed_forward(norm(x))
logits = head(norm(x))
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssm_trn import mixers
from ssm_trn.config import LayerConfig, ModelConfig
from ssm_trn.files import replacing
from ssm_trn.layers import Float32Parameters, GatedFeedForward, RMSNorm, float32_parameters

FORMAT_VERSION = 1
MODEL_TYPE = "ssm_trn"  # by which transformers' Auto classes know the folder, see interop/auto.py
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class Block(nn.Module):
    """A mixer and, where the layer has one, a feed-forward layer, each behind a norm and on the residual stream."""

    def __init__(self, layer: LayerConfig, config: ModelConfig):
        super().__init__()
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = mixers.get(layer.mixer)(config.d_model, **layer.options)
        self.norm_output = layer.norm_output
        self.feed_forward = None
        if layer.feed_forward != "none":
            self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
            self.feed_forward = GatedFeedForward(
                config.d_model, config.d_ff, layer.feed_forward, config.feed_forward_bias
            )

    def forward(self, x, state=None, mask=None, reset=None):
        if self.norm_output:
            y, state = self.mixer(x, state, mask, reset)
            x = x + self.mixer_norm(y)
            if self.feed_forward is not None:
                x = x + self.feed_forward_norm(self.feed_forward(x))
            return x, state
        y, state = self.mixer(self.mixer_norm(x), state, mask, reset)
        x = x + y
        if self.feed_forward is not None:
            x = x + self.feed_forward(self.feed_forward_norm(x))
        return x, state


class LanguageModel(nn.Module):
    """A language model as `config` describes it, with the initial weights of its mixers' papers.

    Attributes:
        checkpoint_activations: keep only the inputs of the blocks for the backward pass and compute the rest anew: less
            memory, a third more time.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(layer, config) for layer in config.layers)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.padded_vocab_size, bias=False)
        if not self.embedding.weight.is_meta:
            self.reset_parameters()

    @classmethod
    def without_memory(cls, config: ModelConfig) -> "LanguageModel":
        """The model on the meta device: shapes only."""
        with torch.device("meta"):
            return cls(config)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights anew; call it after a model made on the meta device was given memory.

        Linear layers and embedding from N(0, 0.02^2); what writes to the residual stream is smaller by the root of the
        number of writes (Radford et al. 2019, section 2.3); mixers then set what their papers ask for.
        """
        writes = sum(1 + (layer.feed_forward != "none") for layer in self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(writes) if name.endswith("out_proj") else 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Float32Parameters):
                module.reset_parameters()

    def forward(self, tokens: Tensor, state=None, mask: Tensor | None = None, reset: Tensor | None = None):
        """Logits of the next token after each of T steps.

        Args:
            tokens: int64 [B, T].
            state: what an earlier call or `init_state` returned; None: nothing came before.
            mask: bool [B, T], True at real tokens. The result is that of the row without its masked steps.
            reset: bool [B, T], True where a document begins; nothing before it is remembered.

        Returns:
            Logits [B, T, vocab_size] and the state after the last step.
        """
        x, state = self.features(tokens, state, mask, reset)
        return self.logits(x), state

    def features(self, tokens: Tensor, state=None, mask: Tensor | None = None, reset: Tensor | None = None):
        """The normalised residual stream [B, T, d_model] and the state: `forward` without the head."""
        _check_inputs(tokens, mask, reset)
        if state is not None and len(state) != len(self.blocks):
            raise ValueError(f"the state has {len(state)} layers, the model {len(self.blocks)}")
        batches = {part.shape[0] for block_state in state or () for part in block_state}
        if batches - {tokens.shape[0]}:
            raise ValueError(f"the state is one of {max(batches)} sequences, the tokens are of {tokens.shape[0]}")
        x, states = self.embedding(tokens), []
        if self.config.embedding_scale != 1:
            x = self.config.embedding_scale * x
        for block, block_state in zip(self.blocks, state or [None] * len(self.blocks), strict=True):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, block_state = checkpoint(block, x, block_state, mask, reset, use_reentrant=False)
            else:
                x, block_state = block(x, block_state, mask, reset)
            states.append(block_state)
        return self.norm(x), tuple(states)

    def logits(self, features: Tensor) -> Tensor:
        """[..., d_model] -> [..., vocab_size]."""
        logits = nn.functional.linear(features, self.embedding.weight) if self.head is None else self.head(features)
        logits, cap = logits[..., : self.config.vocab_size], self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def init_state(self, batch: int, max_length: int, device=None, dtype: torch.dtype | None = None):
        """An empty state with room for max_length tokens, so that shapes stay the same from step to step."""
        device = device or self.embedding.weight.device
        dtype = dtype or self.embedding.weight.dtype
        return tuple(block.mixer.init_state(batch, max_length, device, dtype) for block in self.blocks)

    def state_size(self, context_length: int) -> int:
        """Numbers that one sequence has to remember after context_length tokens."""
        return sum(block.mixer.state_size(context_length) for block in self.blocks)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def save_pretrained(self, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Writes config.json and model.safetensors into `folder`, each whole or not at all.

        `state_dict` holds the weights where the model itself has only a part of each (see training/sharding.py).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        dtype = str(self.embedding.weight.dtype).removeprefix("torch.")
        own = {"format_version": FORMAT_VERSION, "model_type": MODEL_TYPE}
        config = {**own, "dtype": dtype, "model": self.config.to_dict()}
        weights = {name: value.cpu().contiguous() for name, value in (state_dict or self.state_dict()).items()}
        for name, write in (
            (CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2) + "\n")),
            (WEIGHTS_FILE, lambda path: save_file(weights, path, metadata={"format": "pt"})),
        ):
            with replacing(folder / name) as unfinished:
                write(unfinished)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> "LanguageModel":
        """Reads what `save_pretrained` or a training run wrote.

        Raises:
            FileNotFoundError: if the folder holds no model.
            ValueError: if its format is another one or its weights do not fit its config.
        """
        folder = Path(folder)
        if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(
                f"{folder} holds no model ({CONFIG_FILE} and {WEIGHTS_FILE}): a run has one when its training has "
                f"ended; to go on with it: ssm-trn fit --config {folder}/config.yaml --ckpt_path last"
            )
        config = _read_config(folder / CONFIG_FILE)
        try:
            model = cls.without_memory(config)
        except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond what a tensor can have, for one
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{folder / CONFIG_FILE} describes a model that cannot be made: {reason}") from error
        try:
            weights = load_file(folder / WEIGHTS_FILE, device=str(device))
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS_FILE} is not a safetensors file, or a damaged one: {error}") from error
        expected = {name: value.shape for name, value in model.state_dict().items()}
        if expected != {name: value.shape for name, value in weights.items()}:
            differing = sorted(expected.keys() ^ weights.keys()) or "shapes"
            raise ValueError(f"the weights in {folder} do not fit its {CONFIG_FILE}: {differing} differ")
        wide, kept = (torch.float16, torch.bfloat16, torch.float32, torch.float64), float32_parameters(model)
        kinds = {value.dtype for value in weights.values()}
        if kinds - {*wide} or len({value.dtype for name, value in weights.items() if name not in kept}) > 1:
            found = ", ".join(sorted(map(str, kinds)))
            raise ValueError(f"the weights in {folder} are in {found}: it must be one kind of 16, 32 or 64 bits")
        model.load_state_dict(weights, assign=True)
        return model


def _check_inputs(tokens: Tensor, mask: Tensor | None, reset: Tensor | None) -> None:
    """A ValueError for inputs of another kind; ids outside the vocabulary are the embedding's to refuse."""
    if tokens.dim() != 2 or tokens.numel() == 0 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"tokens must be int64 [batch, time], at least one of each, got {tokens.dtype} {list(tokens.shape)}"
        )
    for name, flags in (("mask", mask), ("reset", reset)):
        if flags is not None and (flags.dtype != torch.bool or flags.shape != tokens.shape):
            raise ValueError(f"{name} must be bool {list(tokens.shape)}, got {flags.dtype} {list(flags.shape)}")


def _read_config(path: Path) -> ModelConfig:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return parse_config(saved, str(path))


def parse_config(saved: Any, source: str) -> ModelConfig:
    """The config that the content of a config.json describes; `source` is what errors call it."""
    if not isinstance(saved, dict):
        raise ValueError(f"{source} describes no model")
    if saved.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{source} has format version {saved.get('format_version')}, this release reads {FORMAT_VERSION}"
        )
    if not isinstance(saved.get("model"), dict):
        raise ValueError(f"{source} describes no model")
    return ModelConfig.from_dict(saved["model"])
