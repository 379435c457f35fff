"""Figures of models as tables and plots, made from results.json alone.

python -m ssm_trn.bench.model_report runs/bench_model/results.json     report.md and the plots beside it
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ssm_trn.files import write_whole
from ssm_trn.results import markdown_table, new_figure, remake_report, save_figure

PLOTS = {
    "seconds_to_first_token.svg": ("seconds_to_first_token", "seconds to the first token"),
    "decode_speed.svg": ("tokens_per_second", "decoded tokens per second"),
    "state.svg": ("state_bytes", "bytes of state"),
}


def write_report(results: dict[str, Any], folder: Path) -> None:
    """report.md and the plots in `folder`."""
    for file, (quantity, label) in PLOTS.items():
        plot(results, quantity, label, folder / file)
    parts = ["# What models cost on this device", "## Training", training_table(results)]
    parts += ["## Generation", generation_table(results), notes(results)]
    parts += [f"![{label.capitalize()} over context]({file})" for file, (_, label) in PLOTS.items()]
    write_whole(folder / "report.md", "\n\n".join(parts) + "\n")


def training_table(results: dict[str, Any]) -> str:
    device, models = results["device"], results["models"]
    header = ["model", "parameters", "MFLOP per token", "tokens/s", "share of the device's FLOP/s"]
    header += ["peak memory", "share of the device's memory"]
    optional = _optional_columns([model["training"] for model in models])
    header += [title for title, _ in optional]
    if device["compiles"]:
        header += ["first step"]
    rows = []
    for model in models:
        training = model["training"]
        row = [model["name"], f"{model['parameters']:,}", f"{training['flops_per_token'] / 1e6:,.1f}"]
        row += [f"{training['tokens_per_second']:,.0f}", f"{training['flops_utilisation']:.0%}"]
        peak, size = training["peak_memory_bytes"], device["memory_bytes"]
        row += ["unknown" if peak is None else f"{peak / 2**20:,.0f} MiB"]
        row += [f"{peak / size:.1%}" if peak and size else "unknown"]
        row += [show(training) for _, show in optional]
        if device["compiles"]:
            row += [f"{training['first_call_seconds']:,.1f} s"]
        rows.append(row)
    return markdown_table(header, rows)


def generation_table(results: dict[str, Any]) -> str:
    device = results["device"]
    lines = [(model["name"], line) for model in results["models"] for line in model["generation"]]
    optional = _optional_columns([line for _, line in lines])
    header = [
        "model",
        "context",
        "to the first token",
        "per token",
        "tokens/s",
        "share of the device's bytes/s",
        "state",
    ]
    header += [title for title, _ in optional]
    if device["compiles"]:
        header += ["first call"]
    rows = []
    for name, line in lines:
        row = [name, f"{line['context']:,}", f"{line['seconds_to_first_token'] * 1e3:,.1f} ms"]
        row += [f"{line['seconds_per_token'] * 1e3:,.2f} ms", f"{line['tokens_per_second']:,.0f}"]
        row += [f"{line['bandwidth_utilisation']:.0%}", f"{line['state_bytes'] / 1024:,.0f} KiB"]
        row += [show(line) for _, show in optional]
        if device["compiles"]:
            row += [f"{line['first_call_seconds']:,.1f} s"]
        rows.append(row)
    return markdown_table(header, rows)


def _optional_columns(lines: Sequence[dict[str, Any]]) -> list[tuple[str, Callable[[dict[str, Any]], str]]]:
    """Columns for what only some runs know."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = []
    if all("joules_per_million_tokens" in line for line in lines):
        columns.append(("kJ per million tokens", lambda line: f"{line['joules_per_million_tokens'] / 1e3:,.1f}"))
    if all("price_per_million_tokens" in line for line in lines):
        columns.append(("price per million tokens", lambda line: f"{line['price_per_million_tokens']:,.4f}"))
    return columns


def notes(results: dict[str, Any]) -> str:
    device, work, machine = results["device"], results["workload"], results["machine"]
    limits = ", ".join(
        f"{value / 1e9:,.1f} G{unit}/s ({device['limits_from'][name]})"
        for (name, value), unit in zip(device["limits"].items(), ("FLOP", "bytes "), strict=True)
    )
    price = "" if work["price_per_hour"] is None else f" Prices at {work['price_per_hour']:g} per hour."
    joules = {
        "cpu": " Energy is all that the processor took, for other processes too.",
        "cuda": " Energy is the GPU's, without the machine around it.",
    }.get(device["type"], "")
    energy = joules if "joules_per_million_tokens" in results["models"][0]["training"] else ""
    return (
        f"Training steps (forward, loss, backward, clipping, AdamW) of {work['batch_size']} x {work['block_length']} "
        f"tokens; greedy decoding of {work['new_tokens']} tokens behind random prompts, {work['sequences']} sequence"
        f"{'s' if work['sequences'] > 1 else ''} at once; {work['dtype']}; medians of {work['rounds']} rounds of "
        "wall-clock time, all models in turns in one process. FLOP per token: of a forward pass, counted on the "
        "module, times three. Peak memory: of a training step with weights, gradients and optimizer, in a process of "
        "its own where the device allows. Share of bytes/s: weights and state read once a token. The device's "
        f"limits: {limits}.{price}{energy}\n\n"
        f"{device['name']}, {machine['threads']} threads, Python {machine['python']}, PyTorch {machine['torch']}, "
        f"ssm_trn {machine['ssm_trn']}. Made by `{results['command']}`."
    )


def plot(results: dict[str, Any], quantity: str, label: str, path: Path) -> None:
    """A quantity of generation over the length of the context, both on log axes."""
    figure, axes = new_figure("tokens of context", label)
    for model in results["models"]:
        contexts = [line["context"] for line in model["generation"]]
        axes.plot(contexts, [line[quantity] for line in model["generation"]], marker="o", label=model["name"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    save_figure(figure, axes, path)


def main(arguments: Sequence[str] | None = None) -> None:
    remake_report(__doc__, "models", write_report, arguments)


if __name__ == "__main__":
    main()
