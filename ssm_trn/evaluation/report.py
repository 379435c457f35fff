"""A comparison's results as a table and plots, made from results.json alone.

python -m ssm_trn.evaluation.report runs/compare_quick/results.json                    report.md and plots beside it
python -m ssm_trn.evaluation.report docs/compare_quick/results.json --into README.md   its table between the markers
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ssm_trn.results import markdown_table, new_figure, read_results, save_figure, write_whole

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def write_report(results: dict, folder: Path) -> None:
    """report.md, learning_curves.svg and decode_speed.svg in `folder`."""
    plot_learning_curves(results, folder / "learning_curves.svg")
    plot_decode_speed(results, folder / "decode_speed.svg")
    text = "\n\n".join(
        [
            f"# {results['study']['title']}",
            table(results),
            _notes(results),
            "![Learning curves](learning_curves.svg)",
            "![Decode speed over context](decode_speed.svg)",
        ]
    )
    write_whole(folder / "report.md", text + "\n")


def table(results: dict) -> str:
    """The models as a Markdown table, one row for each model and seed."""
    models, baseline = results["models"], results["study"]["baseline"]
    tasks, lengths = list(models[0]["tasks"]), sorted(models[0]["decode_tokens_per_second"], key=int)
    contexts = (lengths[0], lengths[-1])  # the plot has those between
    seeds = len({model["seed"] for model in models}) > 1
    reference = next(model for model in models if model["name"] == baseline)
    header = ["model", *(["seed"] if seeds else []), "parameters", "MFLOP per token"]
    header += ["bits per byte (95 %)", f"against {baseline} (95 %)"]
    header += [task.replace("_", " ") for task in tasks]
    header += ["training tokens/s"]
    header += [f"decode tokens/s at {int(context):,}" for context in contexts]
    header += [f"state at {int(context):,}" for context in contexts]
    rows = []
    for model in models:
        row = [model["name"].replace("_", " "), *([str(model["seed"])] if seeds else []), f"{model['parameters']:,}"]
        row += [f"{model['flops_per_token'] / 1e6:.2f}"]
        row += [_interval(model["bits_per_byte"]), _difference(model)]
        row += [_task(model["tasks"][task]) for task in tasks]
        row += [_speed(model["training_tokens_per_second"], reference["training_tokens_per_second"])]
        for context in contexts:
            speeds = (entry["decode_tokens_per_second"][context] for entry in (model, reference))
            row += [_speed(*speeds)]
        row += [_bytes(model["state_bytes"][context]) for context in contexts]
        rows.append(row)
    return markdown_table(header, rows)


def into_markers(text: str, content: str) -> str:
    """`text` with `content` between the lines that mark the place of generated results."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"there is no place for the table: put the lines '{BEGIN}' and '{END}' where it belongs")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def _notes(results: dict) -> str:
    study, machine = results["study"], results["machine"]
    first = results["models"][0]
    seeds = ", ".join(str(seed) for seed in sorted({model["seed"] for model in results["models"]}))
    data, baseline, fit = results["data"], study["baseline"].replace("_", " "), study["fit"]
    settings = ", ".join(f"{name} {value}" for name, value in fit["model"]["init_args"].items())
    tasks = ", ".join(f"{name} ({task['metric']}, {task['items']} items)" for name, task in first["tasks"].items())
    layers = "\n".join(
        f"* {model['name'].replace('_', ' ')}: {_layers(model['config'])}" for model in results["models"]
    )
    block, speed = study["block_length"], f"{machine['threads']} threads, PyTorch {machine['torch']}"
    return f"""\
Each model was trained on the same {first["tokens"]:,} tokens in the same order (blocks of {block}, seed {seeds}) of \
{data["source"]}, with one tokenizer of {data["vocab_size"]:,} pieces and the same settings ({settings}), and scored \
on {data["held_out_bytes"]:,} held-out bytes in {data["held_out_documents"]} documents, in windows of {block} tokens.

* Intervals: 95 %, bootstrap over blocks of 1,024 tokens, paired for the difference. They are of these trained models: \
the spread over seeds is not in them.
* Tasks: {tasks or "none"}, with standard error.
* Operations: of a forward pass over {block} tokens.
* Speeds: measured side by side on {machine["processor"]} ({speed}), on training steps of {study["batch_size"]} x \
{block} tokens and on greedy decoding of one sequence; in brackets against {baseline}.
* State: bytes that one sequence has to remember, in float32.
* Learning curves: of the first {first["learning_curve"]["held_out_tokens"]:,} held-out tokens.

Models:

{layers}

Made by `{results["command"]}`, ssm_trn {machine["ssm_trn"]}."""


def _layers(config: dict) -> str:
    """The blocks of a model from bottom to top, each with the options that are set."""
    names = []
    for layer in config["layers"]:
        options = {name: value for name, value in layer.items() if name not in ("mixer", "feed_forward")}
        set_ones = {name: value for name, value in options.items() if value is not None and value is not False}
        shown = ", ".join(f"{name} {value}" for name, value in set_ones.items())
        names.append(
            f"{layer['mixer']} ({shown})" + (" without feed-forward" if layer["feed_forward"] == "none" else "")
        )
    runs = [(name, len(list(group))) for name, group in groupby(names)]
    blocks = "; ".join(f"{count} x {name}" if count > 1 else name for name, count in runs)
    return f"d_model {config['d_model']}, d_ff {config['d_ff']}, {blocks}"


def _interval(estimate: dict) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


def _difference(model: dict) -> str:
    estimate = model.get("difference")
    return "" if estimate is None else f"{estimate['value']:+.3f} ({estimate['low']:+.3f} to {estimate['high']:+.3f})"


def _task(result: dict) -> str:
    error = result.get("stderr")
    return f"{result['value']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _speed(value: float, reference: float) -> str:
    return f"{value:,.0f} ({value / reference:.2f}x)"


def _bytes(count: int) -> str:
    return f"{count / 1024:,.0f} KiB"


def plot_learning_curves(results: dict, path: Path) -> None:
    """Held-out bits per byte while training."""
    figure, axes = new_figure("training tokens", "bits per byte of a part of the held-out text")
    for model in results["models"]:
        curve = model["learning_curve"]
        axes.plot(curve["tokens"], curve["bits_per_byte"], marker="o", markersize=3, label=_label(model, results))
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    save_figure(figure, axes, path)


def plot_decode_speed(results: dict, path: Path) -> None:
    """Decoding speed over the length of the context."""
    figure, axes = new_figure("tokens of context", "decoded tokens per second")
    for model in results["models"]:
        if model["seed"] == results["models"][0]["seed"]:
            speeds = model["decode_tokens_per_second"]
            contexts = [int(context) for context in speeds]
            axes.plot(contexts, list(speeds.values()), marker="o", label=model["name"].replace("_", " "))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_ylim(bottom=0)
    save_figure(figure, axes, path)


def _label(model: dict, results: dict) -> str:
    seeds = len({entry["seed"] for entry in results["models"]}) > 1
    return model["name"].replace("_", " ") + (f", seed {model['seed']}" if seeds else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of a comparison")
    parser.add_argument("--into", type=Path, help="a Markdown file whose marked place takes the table")
    options = parser.parse_args(arguments)
    results = read_results(options.results, "models")
    if options.into is None:
        write_report(results, options.results.parent)
    else:
        write_whole(options.into, into_markers(options.into.read_text(), table(results)))


if __name__ == "__main__":
    sys.exit(main())
