"""A comparison's results as tables and plots, made from results.json alone.

python -m ssm_trn.evaluation.report runs/compare_quick/results.json                    report.md and plots beside it
python -m ssm_trn.evaluation.report docs/compare_quick/results.json --into README.md   its table between the markers
"""

import argparse
import csv
import io
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ssm_trn.evaluation.figures import figures_of
from ssm_trn.evaluation.statistics import Mean
from ssm_trn.evaluation.summary import Row, label, rows_of
from ssm_trn.results import into_markers, markdown_table, read_results, save_figure, write_whole

CSV_FILE, REPORT_FILE = "results.csv", "report.md"


def write_report(results: dict[str, Any], folder: Path) -> None:
    """report.md, results.csv and the plots in `folder`."""
    plots = []
    for name, (figure, axes, title) in figures_of(results).items():
        save_figure(figure, axes, folder / f"{name}.svg")
        plots.append(f"![{title}]({name}.svg)")
    parts = [
        f"# {results['study']['title']}",
        table(results),
        *tries_table(results),
        notes(results),
        models_list(results),
    ]
    write_whole(folder / REPORT_FILE, "\n\n".join([*parts, *plots, made_by(results)]) + "\n")
    write_csv(results, folder / CSV_FILE)


def table(results: dict[str, Any]) -> str:
    return markdown_table(*table_cells(results))


def table_cells(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The models in a table, a row for each model and size: its header and its rows."""
    rows = rows_of(results)
    first = rows[0].first
    lengths = sorted(first["decode_tokens_per_second"], key=int)
    contexts = (lengths[0], lengths[-1])  # the plots have those between
    baseline = label(results["study"]["baseline"])
    header = ["model", "parameters", "MFLOP per token", "bits per byte (95 %)", f"against {baseline} (95 %)"]
    header += [label(task) for task in first["tasks"]]
    header += ["training tokens/s"]
    header += [f"decode tokens/s at {int(context):,}" for context in contexts]
    header += [f"state at {int(context):,}" for context in contexts]
    lines = []
    for row in rows:
        line = [label(row.name), f"{row.first['parameters']:,}", f"{row.first['flops_per_token'] / 1e6:.2f}"]
        line += [_interval(row.bits_per_byte), _difference(row)]
        line += [_task(row, task) for task in first["tasks"]]
        line += [_speed(row, lambda run: run["training_tokens_per_second"])]
        line += [
            _speed(row, lambda run, context=context: run["decode_tokens_per_second"][context]) for context in contexts
        ]
        line += [f"{row.first['state_bytes'][context] / 1024:,.0f} KiB" for context in contexts]
        lines.append(line)
    return header, lines


def tries_table(results: dict[str, Any]) -> list[str]:
    """The learning rates that were tried, as a table; nothing where none were."""
    if not results["learning_rates"]:
        return []
    header, lines = tries_cells(results)
    return ["Validation loss (nats per token) of the learning rates that were tried:", markdown_table(header, lines)]


def tries_cells(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    tries = results["learning_rates"]
    rates = list(dict.fromkeys(entry["learning_rate"] for entry in tries))
    lines: dict[str, list[str]] = {}
    for entry in tries:
        cell = f"{entry['validation_loss']:.4f}"
        lines.setdefault(label(entry["name"]), []).append(f"**{cell}**" if entry["chosen"] else cell)
    return ["model", *(f"{rate:g}" for rate in rates)], [[name, *cells] for name, cells in lines.items()]


def write_csv(results: dict[str, Any], path: Path) -> None:
    """A row for each run, with every figure that is one number."""
    rows = []
    for run in results["models"]:
        row = {name: run[name] for name in ("name", "model", "seed", "parameters", "flops_per_token", "tokens")}
        row |= {"learning_rate": run["settings"].get("learning_rate"), "bits_per_byte": run["bits_per_byte"]["value"]}
        row |= {f"{task} ({score['metric']})": score["value"] for task, score in run["tasks"].items()}
        row["training_tokens_per_second"] = run["training_tokens_per_second"]
        for quantity in ("decode_tokens_per_second", "seconds_to_first_token", "state_bytes"):
            row |= {f"{quantity} at {context}": value for context, value in run[quantity].items()}
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def notes(results: dict[str, Any]) -> str:
    """What was measured, and how, in a few sentences."""
    study, machine, data = results["study"], results["machine"], results["data"]
    rows = rows_of(results)
    first, seeds = rows[0].first, study["seeds"]
    settings = ", ".join(f"{name} {value}" for name, value in first["settings"].items() if name != "learning_rate")
    budgets = list(dict.fromkeys(f"{row.first['tokens']:,}" for row in rows))
    rates = {label(row.name): row.first["settings"].get("learning_rate") for row in rows}
    own = ", ".join(f"{name} {rate}" for name, rate in rates.items())
    rate = f"learning rate {next(iter(rates.values()))}" if len(set(rates.values())) == 1 else f"learning rates {own}"
    tasks = ", ".join(
        f"{label(name)} ({task['metric']}, {task['items']} items)" for name, task in first["tasks"].items()
    )
    block, curve = study["block_length"], first["learning_curve"]
    return f"""\
Each model was trained on the same {" or ".join(budgets)} tokens in the same order (blocks of {block}, seed \
{", ".join(map(str, seeds))}) of {data["source"]}, with one tokenizer of {data["vocab_size"]:,} pieces and the same \
settings ({settings}; {rate}), and scored on {data["held_out_bytes"]:,} held-out bytes in \
{data["held_out_documents"]} documents, in windows of {block} tokens.

* {_about_intervals(len(seeds))}
* Tasks: {tasks or "none"}{", with standard error" if tasks and len(seeds) == 1 else ""}.
* Operations: of a forward pass over {block} tokens.
* Speeds: measured side by side on {machine["processor"]} ({machine["threads"]} threads, PyTorch {machine["torch"]}), \
on training steps of {study["batch_size"]} x {block} tokens and on greedy decoding of one sequence; in brackets \
against {label(study["baseline"])}.
* State: bytes that one sequence has to remember.
* Learning curves: of the first {curve["held_out_tokens"]:,} held-out tokens. They, and the choice among learning \
rates, look at text that the bits per byte are of too.
* Loss by position, speeds and states are those of the first seed."""


def _about_intervals(seeds: int) -> str:
    if seeds == 1:
        return (
            "Intervals: 95 %, bootstrap over blocks of 1,024 tokens, paired for the difference. They are of these "
            "trained models: the spread over seeds is not in them, so no difference is marked as significant."
        )
    return (
        f"Intervals: 95 %, of {seeds} seeds (Student's t) and of the held-out text or the items together; differences "
        "are paired by seed. An asterisk marks a difference to the baseline whose interval leaves 0 out."
    )


def made_by(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"Made by `{results['command']}`, ssm_trn {results['machine']['ssm_trn']}, {versions}."


def models_list(results: dict[str, Any]) -> str:
    lines = (f"* {label(row.name)}: {layers(row.first['config'])}" for row in rows_of(results))
    return "Models:\n\n" + "\n".join(lines)


def layers(config: dict[str, Any]) -> str:
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


def _interval(mean: Mean, sign: str = "") -> str:
    text = f"{mean.value:{sign}.3f}"
    return text if mean.low is None else f"{text} ({mean.low:{sign}.3f} to {mean.high:{sign}.3f})"


def _difference(row: Row) -> str:
    if row.is_baseline:
        return ""
    return _interval(row.bits_per_byte_difference, "+") + _mark(row.bits_per_byte_difference)


def _task(row: Row, task: str) -> str:
    if len(row.runs) == 1:
        score = row.first["tasks"][task]
        return f"{score['value']:.3f}" + ("" if score["stderr"] is None else f" ± {score['stderr']:.3f}")
    return _interval(row.score(task)) + ("" if row.is_baseline else _mark(row.score_difference(task)))


def _mark(difference: Mean) -> str:
    """An asterisk for a difference over seeds that is not 0: of one seed nothing is known about others."""
    return " *" if difference.n > 1 and difference.differs_from_zero else ""


def _speed(row: Row, value: Callable[[dict[str, Any]], float]) -> str:
    return f"{value(row.first):,.0f} ({value(row.first) / value(row.baseline[0]):.2f}x)"


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
