"""What `make test-neuron` does on a NeuronCore works, as far as the simulator can show."""

import csv

import pytest
import torch

from ssm_nki import sdk
from ssm_nki.cases import all_cases
from tests.neuron import measure
from tests.ops.test_nki import KERNEL_CASES


def test_a_table_of_measured_times_beside_modelled_ones(tmp_path, capsys):
    from ssm_nki import cost  # which asks for the simulator: not while tests for a NeuronCore are collected

    path, (case,) = tmp_path / "folder" / "measured.csv", (c for c in all_cases() if c.kernel == "cumulative_sum")
    model = measure.modelled("--kernel", "cumulative_sum")
    row = measure.time_case(case, measure.Simulated(), model, repeats=3)
    assert row["measured ms"] > row["launch ms"] > 0
    assert row["measured / modelled"] == row["measured ms"] / row["modelled ms"]
    measure.write_row(path, {**row, "target": "trn2", "measured ms": 1.5})
    for value in (2.0, 3.25):
        measure.write_row(path, {**row, "measured ms": value})
    with path.open() as file:
        written = [(line["target"], line["measured ms"]) for line in csv.DictReader(file)]
    assert written == [("trn2", "1.5000"), ("trn1", "3.2500")]

    cost.main(["--kernel", "cumulative_sum", "--measured", str(path)])
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines())
    assert header[5:7] == ["ms", "measured ms"]
    assert [line[4:7:2] for line in rows] == [["trn1", "3.250"], ["trn2", "1.500"]]
    with pytest.raises(ValueError, match="nowhere.csv does not exist: `make test-neuron` writes it on a NeuronCore"):
        cost.main(["--kernel", "cumulative_sum", "--measured", str(tmp_path / "nowhere.csv")])


@pytest.mark.parametrize("case", [KERNEL_CASES[1], KERNEL_CASES[-2]], ids=lambda case: case.name)
def test_comparison_with_torch(case):
    assert all(error < 1e-5 for error in measure.compare(case, measure.Simulated.device, 9, torch.float32))
    errors = measure.compare(case, measure.Simulated.device, 9, torch.bfloat16)
    assert all(error < 2e-2 for error in errors)
    assert max(errors) > 1e-5  # it is the kernel that ran: torch rounds elsewhere


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    with pytest.raises(LookupError, match="the Neuron SDK is not installed"):
        measure.NeuronCore()
    monkeypatch.setattr(sdk, "REAL", True)
    monkeypatch.setitem(measure.sys.modules, "torch_xla", None)
    with pytest.raises(LookupError, match="torch_xla is not installed"):
        measure.NeuronCore()


def test_the_target_is_that_of_the_instance(monkeypatch, tmp_path):
    product = tmp_path / "product"
    monkeypatch.setattr(measure, "PRODUCT", product)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    for name, target in (("trn1.2xlarge\n", "trn1"), ("inf2.xlarge", "trn1"), ("trn2.48xlarge", "trn2")):
        product.write_text(name)
        assert measure.target_of_this_machine() == target
    product.write_text("a laptop")
    with pytest.raises(LookupError, match="this machine is 'a laptop'"):
        measure.target_of_this_machine()
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert measure.target_of_this_machine() == "trn2"
