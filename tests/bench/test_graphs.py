"""The table of graphs is what its results say, and they meet what is wanted; tests/xla/test_graphs.py measures anew."""

from pathlib import Path

from ssm_trn.bench import graphs
from ssm_trn.results import read_results

FOLDER = Path(__file__).parents[2] / graphs.FOLDER


def test_the_page_is_made_from_the_results(tmp_path):
    results = read_results(FOLDER / "results.json", "graphs")
    graphs.write_report(results, tmp_path)
    assert (tmp_path / "README.md").read_text() == (FOLDER / "README.md").read_text()


def test_graphs_grow_less_than_twofold_and_stay_on_the_device():
    rows = read_results(FOLDER / "results.json", "graphs")["graphs"]
    assert {(row["mixer"], row["length"]) for row in rows} == {(m, n) for m in graphs.MIXERS for n in graphs.LENGTHS}
    assert all(graphs.growth(rows, mixer) < 2 for mixer in graphs.MIXERS)
    assert not any(row["fallbacks"] for row in rows)
