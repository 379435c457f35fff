"""The report of a comparison: tables, figures and the page that needs no other file, from results alone."""

import csv
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from ssm_trn import ModelConfig
from ssm_trn.evaluation import page, report
from ssm_trn.evaluation.figures import FIGURES, figures_of
from ssm_trn.evaluation.summary import rows_of

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def run(model: str, size: int, seed: int, bits: float, recall: float) -> dict:
    """A run as results.json has it."""
    mixer = {"mixer": "attention", "n_heads": 2} if model == "transformer" else model
    entry = {
        "name": f"{model}-{size}k",
        "model": model,
        "seed": seed,
        "settings": {"warmup_steps": 5, "learning_rate": 0.002},
        "config": ModelConfig(64, 16, [mixer] * 2).to_dict(),
        "parameters": 1000 * size,
        "flops_per_token": 2000.0 * size,
        "tokens": 100_000,
        "bits_per_byte": {"value": bits, "low": bits - 0.03, "high": bits + 0.03},
        "tasks": {
            "ssm_key_value_64": {"metric": "acc", "items": 100, "value": recall, "stderr": 0.01},
            "a<b": {"metric": "perplexity", "items": 100, "value": 20 * bits, "stderr": None},
        },
        "learning_curve": {"held_out_tokens": 500, "tokens": [50_000, 100_000], "bits_per_byte": [bits + 1, bits]},
        "loss_by_position": {"positions": [1, 2, 4], "nats": [4.0, 3.0, 2.5], "tokens": [5, 5, 10]},
        "training_tokens_per_second": 1000.0,
        "seconds_to_first_token": {"64": 0.01, "512": 0.1},
        "decode_tokens_per_second": {"64": 200.0, "512": 100.0},
        "state_bytes": {"64": 4096, "512": 4096 if model != "transformer" else 32768},
        "command": "ssm-trn fit --config run/experiment.yaml",
    }
    if model != "transformer":
        entry["difference"] = {"value": bits - 2.0, "low": bits - 2.005, "high": bits - 1.995}
    return entry


def results(seeds: int = 2, sizes: tuple[int, ...] = (300, 600), **changes) -> dict:
    """Results in which the recurrent model has fewer bits per byte by 0.1, and recalls worse or better by chance."""
    models = []
    for seed in range(seeds):
        for size in sizes:
            models.append(run("gated_deltanet", size, seed, 1.9 + 0.001 * seed, 0.5 + 0.1 * seed))
            models.append(run("transformer", size, seed, 2.0, 0.55))
    tries = [
        {"name": models[0]["name"], "learning_rate": rate, "tokens": 1, "validation_loss": loss, "chosen": loss == 4.0}
        for rate, loss in ((0.001, 5.0), (0.002, 4.0))
    ]
    machine = {"processor": "abacus", "cores": 1, "threads": 1, "system": "Linux", "python": "3", "torch": "2"}
    return {
        "format_version": 1,
        "command": "ssm-trn compare study.yaml",
        "study": {
            "title": "Beads & <rods>",
            "baseline": "transformer",
            "seeds": list(range(seeds)),
            "block_length": 2,
            "batch_size": 4,
        },
        "data": {"source": "sotu", "vocab_size": 64, "held_out_bytes": 5000, "held_out_documents": 3},
        "models": models,
        "learning_rates": tries,
        "machine": machine | {"ssm_trn": "0.1"},
        "versions": {"torch": "2"},
        **changes,
    }


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_each_size_is_compared_with_the_baseline_of_that_size():
    rows = rows_of(results())
    assert [row.name for row in rows] == [
        "gated_deltanet-300k", "transformer-300k", "gated_deltanet-600k", "transformer-600k",
    ]  # fmt: skip
    assert [row.baseline[0]["name"] for row in rows] == ["transformer-300k"] * 2 + ["transformer-600k"] * 2
    assert [row.is_baseline for row in rows] == [False, True, False, True] and len(rows[0].runs) == 2


def test_only_differences_that_seeds_and_items_confirm_are_marked():
    header, _, first, second, *_ = cells(report.table(results()))
    bits, recall = header.index("against transformer (95 %)"), header.index("ssm key value 64")
    assert first[bits] == "-0.100 (-0.108 to -0.091) *"  # hypot(12.706 * 0.0005, 0.005)
    assert first[recall].startswith("0.550 (") and "*" not in first[recall] and second[bits] == ""
    same = results()
    for entry in same["models"]:
        entry["tasks"]["ssm_key_value_64"]["value"] = 0.5 if entry["model"] == "transformer" else 0.52
    assert "*" not in cells(report.table(same))[2][recall]  # no spread over seeds, but 100 items can't tell these apart
    for entry in same["models"]:
        entry["tasks"]["ssm_key_value_64"]["value"] += 0.2 * (entry["model"] != "transformer")
    assert cells(report.table(same))[2][recall].endswith("*")


def test_of_one_seed_nothing_is_marked():
    one = results(seeds=1)
    header, _, first, *_ = cells(report.table(one))
    assert first[header.index("against transformer (95 %)")] == "-0.100 (-0.105 to -0.095)"
    assert first[header.index("bits per byte (95 %)")] == "1.900 (1.870 to 1.930)"
    assert first[header.index("ssm key value 64")] == "0.500 ± 0.010" and first[header.index("a<b")] == "38.000"
    assert "no difference is marked" in report.notes(one) and "no difference is marked" not in report.notes(results())


def test_the_learning_rate_that_was_chosen_stands_out():
    assert cells(report.tries_table(results())[1])[2] == ["gated deltanet-300k", "5.0000", "**4.0000**"]
    assert report.tries_table(results(learning_rates=[])) == []


def test_figures_are_those_that_the_results_have():
    assert list(figures_of(results())) == list(FIGURES)
    single = results(sizes=(300,))
    for entry in single["models"]:
        del entry["tasks"]["ssm_key_value_64"]
        entry["loss_by_position"] = None
    assert {*FIGURES} - {*figures_of(single)} == {"size", "recall", "loss_by_position"}


def test_report_and_csv_hold_every_run(tmp_path):
    of = results()
    report.write_report(of, tmp_path)
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], int(row["seed"])) for row in rows] == [
        (entry["name"], entry["seed"]) for entry in of["models"]
    ]
    assert float(rows[0]["ssm_key_value_64 (acc)"]) == 0.5 and float(rows[0]["bits_per_byte"]) == 1.9
    text = (tmp_path / "report.md").read_text()
    assert report.table(of) in text and all(f"]({name}.svg)" in text for name in figures_of(of))
    assert all((tmp_path / f"{name}.svg").exists() for name in figures_of(of))


class Reader(HTMLParser):
    """Looks for what would make a page depend on other files, for ids, and for the text of tables."""

    def __init__(self):
        super().__init__()
        self.references, self.ids, self.tags, self.cells, self._cell = [], [], [], [], False

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.references += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        self._cell = tag == "td"

    def handle_data(self, data):
        if self._cell:
            self.cells.append(data)
            self._cell = False


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "results.json").write_text(json.dumps(results()))
    page.main([str(folder / "results.json")])
    return folder / "report.html"


def test_the_page_needs_no_other_file_and_is_small(written):
    text, reader = written.read_text(), Reader()
    reader.feed(text)
    assert reader.references and all(reference.startswith("#") for reference in reader.references)
    assert "script" not in reader.tags and "@import" not in text and not re.search(r"url\((?!#)", text)
    assert len(reader.ids) == len(set(reader.ids)) and {reference[1:] for reference in reader.references} <= {
        *reader.ids
    }
    assert all(found in reader.ids for found in re.findall(r"url\(#([^)]+)\)", text))
    assert len(text.encode()) < 2 * 2**20 and reader.tags.count("svg") == len(FIGURES)


def test_the_page_holds_tables_configurations_and_commands(written):
    text, reader = written.read_text(), Reader()
    reader.feed(text)
    of = results()
    _, rows = report.table_cells(of)
    assert all(cell in reader.cells for row in rows for cell in row if cell)
    assert "<title>Beads &amp; &lt;rods&gt;</title>" in text and "<th>a&lt;b</th>" in text
    assert "<strong>4.0000</strong>" in text and html.escape(of["models"][0]["command"]) in text
    assert "mixer: gated_deltanet" in text and "prefers-color-scheme" not in text  # the colours are the browser's own


PROBE = """<!DOCTYPE html><body><iframe id="frame" style="width: %dpx; height: 800px; border: 0"></iframe><script>
const frame = document.getElementById("frame");
frame.onload = () => {
  const page = frame.contentDocument, style = frame.contentWindow.getComputedStyle(page.querySelector("svg"));
  const drawn = [...page.querySelectorAll("svg")].every(svg => svg.getBoundingClientRect().height > 100);
  const wide = page.documentElement.scrollWidth, background = frame.contentWindow.getComputedStyle(page.body).color;
  document.body.innerHTML = `<p id="found">${wide} ${drawn} ${style.fill === background} ${background}</p>`;
};
frame.srcdoc = %s;
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page_in_any_width_and_in_dark_mode(written, tmp_path, width, dark):
    probe = tmp_path / "probe.html"
    content = json.dumps(written.read_text()).replace("</", "<\\/")
    probe.write_text(PROBE % (width, content))
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    command = [CHROMIUM, *options, *scheme, "--virtual-time-budget=5000", f"file://{probe}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    wide, drawn, same, colour = re.search(r'<p id="found">(\d+) (\w+) (\w+) (.+?)</p>', shown).groups()
    assert int(wide) <= width, "the page is wider than the window"
    assert drawn == same == "true", "figures are drawn, in the colour of the text"
    assert colour == ("rgb(255, 255, 255)" if dark else "rgb(0, 0, 0)")
