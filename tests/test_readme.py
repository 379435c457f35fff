"""What README tells a user to type works, and its table is what the results say."""

import re
import shlex
from pathlib import Path

import pytest

from ssm_trn.bench import report as bench_report
from ssm_trn.cli import main
from ssm_trn.evaluation import report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "kernels" / "README.md"]
COMMANDS = [shlex.split(line, comments=True) for line in re.findall(r"^    ssm-trn (.*)", README, re.MULTILINE)]

# What makes each command small enough for a test; the commands themselves stay as they are.
TINY_RUN = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1"]
TINY_RUN += ["--trainer.enable_progress_bar", "false", "--data.init_args.block_length", "64"]
TINY = {"prepare": [], "fit": TINY_RUN, "evaluate": ["--limit", "4", "--tasks", "true_ending"], "compare": ["--help"]}
TINY["generate"] = ["--max_new_tokens", "8"]


def test_what_the_readme_types_works_one_after_the_other(tmp_path, monkeypatch, capsys):
    for folder in ("configs", "experiments"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    assert [words[0] for words in COMMANDS] == ["prepare", "fit", "evaluate", "generate", "compare"]
    for words in COMMANDS:
        assert main([*words, *TINY[words[0]]]) == 0
    assert (tmp_path / "runs" / "mamba2_2m_sotu" / "evaluation.json").exists()
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_exists(page):
    for place in re.findall(r"\]\(((?!https?:)[^)#]+)", page.read_text()):
        assert (page.parent / place).exists(), place


def test_the_table_is_that_of_the_results():
    table = report.table(report.read_results(ROOT / "docs" / "compare_quick" / "results.json", "models"))
    assert report.into_markers(README, table) == README


@pytest.mark.parametrize(
    ("folder", "of", "write"),
    [("compare_quick", "models", report.write_report), ("bench", "comparisons", bench_report.write_report)],
    ids=["compare_quick", "bench"],
)
def test_a_report_in_docs_is_that_of_its_results(folder, of, write, tmp_path):
    write(report.read_results(ROOT / "docs" / folder / "results.json", of), tmp_path)
    assert (tmp_path / "report.md").read_text() == (ROOT / "docs" / folder / "report.md").read_text()
