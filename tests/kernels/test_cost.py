"""`python -m ssm_nki.cost`."""

import csv
from pathlib import Path

import numpy as np
import pytest

from ssm_nki import cases, cost

README = Path(__file__).parents[2] / "kernels" / "README.md"
QUICK = {("cumulative_sum", "fwd"), ("short_conv", "fwd")}  # kernels whose cost takes less than a second


@pytest.fixture
def some_rows():
    return cost.table([case for case in cases.all_cases() if case.kernel == "cumulative_sum"])


def test_rows(some_rows):
    on_trn1, on_trn2 = some_rows
    assert (on_trn1["target"], on_trn2["target"]) == ("trn1", "trn2")
    assert on_trn1["ms"] == max(on_trn1[resource] for resource in cost.RESOURCES)
    assert on_trn1[on_trn1["critical"]] == on_trn1["ms"]
    assert on_trn2["psum_port"] is None
    nbytes = 2 * 2048 * 32 * 4
    assert on_trn1["floor by DMA"] == pytest.approx(nbytes / 272e6)
    assert on_trn1["floor by FLOPs"] == pytest.approx(2048 * 32 / 23e9)
    assert on_trn1["ratio to floor"] == pytest.approx(on_trn1["ms"] / (nbytes / 272e6))


def test_files(tmp_path, capsys):
    page, table = tmp_path / "page.md", tmp_path / "table.csv"
    page.write_text(f"before\n{cost.BEGIN}\nold\n{cost.END}\nafter\n")
    cost.main(["--kernel", "cumulative_sum", "--csv", str(table), "--into", str(page)])
    printed = capsys.readouterr().out.strip()
    assert page.read_text() == f"before\n{cost.BEGIN}\n\n{printed}\n\n{cost.END}\nafter\n"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["target"] for row in rows] == ["trn1", "trn2"]
    assert all(f" {row['ms']} " in printed for row in rows)


def test_wrong_input(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="for the table to stand between"):
        cost.main(["--kernel", "cumulative_sum", "--into", str(page)])
    assert page.read_text() == "no markers"
    with pytest.raises(ValueError, match="There is no kernel 'nothing'; there are cumulative_sum"):
        cost.main(["--kernel", "nothing"])


def test_cases_are_distinct_and_buildable():
    known = [(case.kernel, case.direction, case.shape) for case in cases.all_cases()]
    assert len(set(known)) == len(known)
    for case in cases.all_cases():
        assert case.direction in ("fwd", "bwd")
        assert case.dtype in ("bfloat16", "float32")
        _, arguments = case.build()
        assert any(isinstance(argument, np.ndarray) for argument in arguments)


def test_the_table_in_the_readme_is_that_of_the_cases():
    """Of all kernels the rows that it has; of some, what stands in them."""
    text = README.read_text()
    header, _, *rows = text[text.index(cost.BEGIN) : text.index(cost.END)].splitlines()[2:-1]
    found = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    expected = [[c.kernel, c.direction, c.shape, target] for c in cases.all_cases() for target in ("trn1", "trn2")]
    assert [row[:4] for row in found] == expected
    if "measured ms" not in header:
        quick = cost.table([case for case in cases.all_cases() if (case.kernel, case.direction) in QUICK])
        assert set(cost.markdown(quick).splitlines()[2:]) <= set(rows)
