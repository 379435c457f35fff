"""docs/synthetic/README.md: the tasks, the settings of their papers, what guessing gets and what a perfect oracle.

python -m ssm_trn.data.synthetic.report            writes docs/synthetic/README.md
"""

import argparse
from inspect import getdoc
from pathlib import Path

import numpy as np

from ssm_trn.data.datamodule import IGNORED
from ssm_trn.data.synthetic import TASKS, Task
from ssm_trn.files import write_whole
from ssm_trn.results import markdown_table

_ROWS = 100
_HEAD = f"""\
# Synthetic tasks

Each is trained by its experiment, as in `ssm-trn fit --config experiments/synthetic_mqar.yaml`, through
`ssm_trn.data.synthetic.SyntheticDataModule`, and used from Python as

```python
from ssm_trn.data import synthetic

task = synthetic.make("mqar", length=64, pairs=8)
batch = task.batch("train", step=0, rows=64, seed=0)  # tokens, targets and reset; the same whenever it is asked for
```

Options that are not given are those of the paper. The figures below are of the test split in the setting of the paper.
*Chance* is a guess among all tokens that can be an answer; *most frequent* is what always giving the most frequent
answer gets, on up to 4,000 rows; *oracle* what the rules of the task get from the tokens alone, on {_ROWS} rows.
"""


def table() -> str:
    """The tasks with their figures."""
    header = ["task", "length", "steps", "ids", "scored steps in a row", "chance", "most frequent", "oracle"]
    return markdown_table(header, [_figures(name, task()) for name, task in TASKS.items()])


def _figures(name: str, task: Task) -> list[str]:
    batch = task.batch("test", 0, max(_ROWS, min(4000, 2**20 // task.steps)))
    tokens, targets = batch["tokens"].numpy(), batch["targets"].numpy()
    scored = targets != IGNORED
    frequent = np.bincount(targets[scored]).max() / scored.sum()
    answers = np.stack([task.solve(row) for row in tokens[:_ROWS]])
    right = (answers == targets[:_ROWS])[scored[:_ROWS]].mean()
    numbers = [f"{number:,}" for number in (task.length, task.steps, task.vocab_size)]
    return [name, *numbers, f"{scored.sum(1).mean():.1f}", f"{1 / task.answers:.4f}", f"{frequent:.4f}", f"{right:.4f}"]


def report() -> str:
    """The whole page."""
    parts = [_HEAD, table()]
    for name, task in TASKS.items():
        parts.append(f"## {name}\n\n{_description(task)}\n\nSource: {task.paper}.\n\nPaper's setting: {task.setting}.")
    parts.append("Made by `python -m ssm_trn.data.synthetic.report`.")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _description(task: type[Task]) -> str:
    """The docstring as Markdown: its attributes are a list."""
    text, _, attributes = (getdoc(task) or "").partition("Attributes:\n")
    lines = []
    for line in attributes.splitlines():
        name, colon, rest = line.removeprefix("    ").partition(": ")
        lines.append(f"* `{name}`: {rest}" if colon and not line.startswith("        ") else line.strip())
    return "\n".join([text.rstrip(), "", *lines]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the page of the synthetic tasks.")
    parser.add_argument("--output", type=Path, default=Path("docs/synthetic/README.md"))
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, report())


if __name__ == "__main__":
    main()
