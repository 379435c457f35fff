"""The learning rate as a function of the step alone, so that a resumed run needs no saved scheduler."""

import math


def learning_rate_ratio(step: int, warmup_steps: int, total_steps: int, final_ratio: float) -> float:
    """The learning rate of a step as a share of the peak: a linear warm-up, then a cosine down to `final_ratio`.

    The warm-up starts at 1/warmup_steps, not at 0: the first step already learns, and a compiler that treats the
    constant 0 specially sees no graph of its own for it.

    Args:
        step: optimizer steps done before this one, from 0.
        warmup_steps: steps of the linear rise; the last of them has the full rate.
        total_steps: steps of the whole training; from there on the ratio stays at `final_ratio`.
        final_ratio: in [0, 1].
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
