"""The figures of a comparison, made from its results alone."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ssm_trn.evaluation.summary import is_recall, label, rows_of
from ssm_trn.results import new_figure

MARKERS = "os^vD*"  # of tasks


def learning_curves(results: dict[str, Any]):
    """Held-out bits per byte while training: each seed a thin line, their mean a thick one."""
    figure, axes = new_figure("training tokens", "bits per byte of a part of the held-out text")
    for number, row in enumerate(rows_of(results)):
        curves = [run["learning_curve"] for run in row.runs]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(curve["tokens"], curve["bits_per_byte"], color=f"C{number}", linewidth=0.6, alpha=0.6)
        shortest = min(len(curve["tokens"]) for curve in curves)
        mean = np.mean([curve["bits_per_byte"][:shortest] for curve in curves], 0)
        axes.plot(
            curves[0]["tokens"][:shortest], mean, color=f"C{number}", marker="o", markersize=3, label=label(row.name)
        )
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    return figure, axes


def size(results: dict[str, Any]):
    """Bits per byte over the number of parameters; None for a study of one size."""
    rows = rows_of(results)
    names = list(dict.fromkeys(row.first["model"] for row in rows))
    if len(rows) == len(names):
        return None
    figure, axes = new_figure("parameters", "bits per byte")
    for number, name in enumerate(names):
        own = [row for row in rows if row.first["model"] == name]
        parameters = [row.first["parameters"] for row in own]
        means = [row.bits_per_byte for row in own]
        spread = [mean.half_width for mean in means]
        values = [mean.value for mean in means]
        axes.errorbar(parameters, values, spread, color=f"C{number}", marker="o", capsize=3, label=label(name))
    axes.set_xscale("log")
    return figure, axes


def recall(results: dict[str, Any]):
    """Accuracy of recall over the bytes of state at the longest context; None where no task asks for it."""
    rows = rows_of(results)
    tasks = [task for task in rows[0].first["tasks"] if is_recall(task)]
    if not tasks:
        return None
    figure, axes = new_figure("bytes of state at the longest context", "accuracy of recall")
    for number, row in enumerate(rows):
        state = row.first["state_bytes"][max(row.first["state_bytes"], key=int)]
        for task in tasks:
            mean, marker = row.score(task), MARKERS[tasks.index(task) % len(MARKERS)]
            name = label(row.name) if task == tasks[0] else None
            axes.errorbar([state], [mean.value], [mean.half_width], color=f"C{number}", marker=marker, label=name)
    for task, marker in zip(tasks, MARKERS, strict=False):
        axes.plot([], [], marker, color="grey", label=label(task))
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    return figure, axes


def loss_by_position(results: dict[str, Any]):
    """Nats per token over the number of tokens before; None where no document was long enough."""
    rows = [row for row in rows_of(results) if row.first["loss_by_position"]]
    if not rows:
        return None
    figure, axes = new_figure("tokens before, up to", "nats per token")
    for row in rows:
        curve = row.first["loss_by_position"]
        axes.plot(curve["positions"], curve["nats"], marker="o", markersize=3, label=label(row.name))
    axes.axvline(results["study"]["block_length"], color="grey", linewidth=0.8, linestyle=":")
    _log_contexts(axes, curve["positions"][::2])
    return figure, axes


def _over_context(quantity: str, y_label: str, results: dict[str, Any]):
    figure, axes = new_figure("tokens of context", y_label)
    for row in rows_of(results):
        values = row.first[quantity]
        axes.plot([int(context) for context in values], list(values.values()), marker="o", label=label(row.name))
    _log_contexts(axes, [int(context) for context in values])
    axes.set_yscale("log")
    return figure, axes


def throughput(results: dict[str, Any]):
    """Decoding speed over the length of the context."""
    return _over_context("decode_tokens_per_second", "decoded tokens per second", results)


def first_token(results: dict[str, Any]):
    """Time to the first token over the length of the prompt."""
    return _over_context("seconds_to_first_token", "seconds to the first token", results)


def state(results: dict[str, Any]):
    """Size of the state over the length of the context."""
    return _over_context("state_bytes", "bytes of state", results)


def _log_contexts(axes, contexts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])


# By file name: the figure and what it shows. A figure may be None.
FIGURES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "learning_curves": (learning_curves, "Learning curves"),
    "size": (size, "Bits per byte over size"),
    "recall": (recall, "Recall over the size of the state"),
    "loss_by_position": (loss_by_position, "Loss by position; dotted: the length of the training"),
    "decode_speed": (throughput, "Decoding speed over context"),
    "first_token": (first_token, "Time to the first token over context"),
    "state": (state, "Size of the state over context"),
}


def figures_of(results: dict[str, Any]) -> dict[str, tuple[Any, Any, str]]:
    """By name: figure, axes and title of those that these results have."""
    made = {name: (make(results), title) for name, (make, title) in FIGURES.items()}
    return {name: (*drawn, title) for name, (drawn, title) in made.items() if drawn is not None}
