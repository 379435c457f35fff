"""How fast models of one comparison train and decode, measured side by side.

The models take turns, so that whatever else the machine does meets them alike; each figure is the median over rounds.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_trn.model import LanguageModel
from ssm_trn.timing import Name, take_turns


def _median_seconds(calls: Mapping[Name, Callable[[], None]], rounds: int) -> dict[Name, float]:
    take_turns(calls, rounds=1)  # a warm-up
    return {name: statistics.median(seconds) for name, seconds in take_turns(calls, rounds).items()}


def training_speeds(
    models: Mapping[str, LanguageModel], batch: Mapping[str, Tensor], rounds: int = 5
) -> dict[str, float]:
    """Tokens per second of training steps (forward, backward, clipping, AdamW) on one batch of training data.

    The models' weights change.
    """

    def step_of(model: LanguageModel) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step() -> None:
            logits, _ = model(batch["tokens"], reset=batch["reset"])
            F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    seconds = _median_seconds({name: step_of(model) for name, model in models.items()}, rounds)
    return {name: batch["tokens"].numel() / value for name, value in seconds.items()}


@torch.inference_mode()
def decoding_speeds(
    models: Mapping[str, LanguageModel], contexts: Sequence[int], steps: int = 32, rounds: int = 5
) -> dict[str, dict[int, float]]:
    """Tokens per second of greedy decoding, one sequence at a time, behind contexts of random tokens."""

    def decode_of(model: LanguageModel, context_length: int) -> Callable[[], None]:
        context = torch.randint(model.config.vocab_size, (1, context_length))
        _, state = model.features(context, model.init_state(1, context_length + steps))

        def decode() -> None:
            token, memory = context[:, -1:], state  # its free slots are written anew in each round
            for _ in range(steps):
                logits, memory = model(token, memory)
                token = logits.argmax(-1)

        return decode

    calls = {(name, context): decode_of(model, context) for name, model in models.items() for context in contexts}
    seconds = _median_seconds(calls, rounds)
    return {name: {context: steps / seconds[name, context] for context in contexts} for name in models}


def speeds(
    models: Mapping[str, LanguageModel], batch: Mapping[str, Tensor], contexts: Sequence[int], rounds: int = 5
) -> dict[str, dict]:
    """For each model: training tokens/s, and for each context length decode tokens/s and bytes of state (float32)."""
    decoding = decoding_speeds(models, contexts, rounds=3 * rounds)  # short calls: more of them for a steady median
    training = training_speeds(models, batch, rounds)
    return {
        name: {
            "training_tokens_per_second": training[name],
            "decode_tokens_per_second": {str(context): speed for context, speed in decoding[name].items()},
            "state_bytes": {str(context): 4 * model.state_size(context) for context in contexts},
        }
        for name, model in models.items()
    }
