"""A comparison as one web page that needs no other file: tables, figures as SVG, configurations and commands.

python -m ssm_trn.evaluation.page runs/compare_quick/results.json     report.html beside it
"""

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ssm_trn.evaluation.figures import figures_of
from ssm_trn.evaluation.report import layers, made_by, notes, table_cells, tries_cells
from ssm_trn.evaluation.summary import label, rows_of
from ssm_trn.results import remake_report, write_whole

PAGE_FILE = "report.html"

# Figures are drawn in black on white: what is black takes the colour of the text, what is white lets the page through.
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 72rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
td { white-space: nowrap; } th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
.figures { display: grid; gap: 1rem; margin-top: 2rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; fill: currentColor; }
svg [style*="stroke: #000000"] { stroke: currentColor !important; }
svg [style*="fill: #ffffff"] { fill: none !important; }
pre { overflow-x: auto; font-size: .8rem; } summary { cursor: pointer; overflow-wrap: anywhere; }
code { overflow-wrap: anywhere; }
"""


def write_page(results: dict[str, Any], folder: Path) -> None:
    """report.html in `folder`."""
    write_whole(folder / PAGE_FILE, page(results))


def page(results: dict[str, Any]) -> str:
    title = html.escape(results["study"]["title"])
    parts = [f"<h1>{title}</h1>", _table(*table_cells(results))]
    if results["learning_rates"]:
        parts += ["<h2>Learning rates that were tried</h2>", _table(*tries_cells(results))]
    parts += [f'<div class="figures">{"".join(_figures(results))}</div>']
    parts += ["<h2>How this was measured</h2>", _text(notes(results))]
    parts += ["<h2>Models</h2>", *_models(results)]
    study = yaml.safe_dump(results["study"], sort_keys=False, allow_unicode=True)
    parts += ["<h2>The study</h2>", _details("The study's settings", study), _text(made_by(results))]
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _figures(results: dict[str, Any]) -> list[str]:
    return [
        f"<figure><figcaption>{html.escape(title)}</figcaption>{_svg(name, figure, axes)}</figure>"
        for name, (figure, axes, title) in figures_of(results).items()
    ]


def _svg(name: str, figure, axes) -> str:
    """The figure as an <svg> element with text as text, and with ids that no other figure of the page has."""
    from matplotlib import rc_context

    axes.legend(frameon=False)
    figure.set_size_inches(5.2, 3.6)  # so that letters stay readable in a phone's width
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)


def _models(results: dict[str, Any]) -> list[str]:
    """For each model its layers, configuration, and the command of each run."""
    parts = []
    for row in rows_of(results):
        commands = "\n".join(f"{run['command']}    # seed {run['seed']}" for run in row.runs)
        config = yaml.safe_dump({**row.first["settings"], "config": row.first["config"]}, sort_keys=False)
        parts.append(_details(f"{label(row.name)}: {layers(row.first['config'])}", f"{commands}\n\n{config}"))
    return parts


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(content)}</pre></details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join(f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _text(markdown: str) -> str:
    """Paragraphs and lists of the report as HTML."""
    parts = []
    for block in markdown.split("\n\n"):
        if block.startswith("* "):
            items = "".join(f"<li>{_inline(item)}</li>" for item in block[2:].split("\n* "))
            parts.append(f"<ul>{items}</ul>")
        else:
            parts.append(f"<p>{_inline(block)}</p>")
    return "".join(parts)


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def main(arguments: Sequence[str] | None = None) -> None:
    remake_report(__doc__, "models", write_page, arguments)


if __name__ == "__main__":
    main()
