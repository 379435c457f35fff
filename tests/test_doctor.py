"""`ssm-trn doctor`, on environments made up for each rule and on the one that runs the tests."""

import tomllib
from pathlib import Path

import pytest

from ssm_trn import doctor
from ssm_trn.cli import main
from ssm_trn.known_faults import NKI_OF_COMPILER, RULES, Environment, faults_of
from tests.test_constraints import FILES, pins

ROOT = Path(__file__).parents[1]
TRN1 = {"torch": "2.9.1+cpu", "torch-xla": "2.9.0", "torch-neuronx": "2.9.0.2.15.32035+de43f57c"}
TRN1 |= {"neuronx-cc": "2.26.6360.0+6f180f47", "libneuronxla": "2.2.17544.0", "nki": "0.5.0+28631259367.ga768afa6"}
TRN2 = {"torch": "2.13.0+cpu", "torch-neuronx": "2.13.3.0.1", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"}

# A change to a good environment, and words of the one sentence that it must bring about.
FAULTS = [
    ({"lightning": "2.6.2"}, {}, "malicious"),
    ({"lightning": "2.6.3"}, {}, "malicious"),
    ({"torch-neuronx": "1.0"}, {}, "torch-neuronx 1.0 is the empty package"),
    ({"neuronx-cc": "1.0.post1"}, {}, "neuronx-cc 1.0.post1 is the empty package"),
    ({"libneuronxla": "1.0"}, {}, "libneuronxla 1.0 is the empty package"),
    ({"nki": "0.0.1"}, {}, "nki 0.0.1 is the empty package"),
    ({"neuronx-distributed": "0.1"}, {}, "neuronx-distributed 0.1 is the empty package"),
    ({"torch": "2.13.0", "torch-xla": "2.9.0"}, {}, "torch-xla 2.9.0 cannot be imported beside torch 2.13.0"),
    ({"torch-xla": "2.9.0"}, {}, "torch-xla 2.9.0 cannot be imported beside torch none"),
    (TRN2 | {"torch": "2.14.0"}, {}, "not for 2.14.0"),
    (TRN1 | {"torch-xla": None}, {}, "runs on torch-xla, which is not installed"),
    (TRN2 | {"torch-xla": "2.13.0"}, {}, "Parts of both products"),
    (TRN2 | {"libneuronxla": "2.2.17544.0"}, {}, "Parts of both products"),
    (TRN2, {"instance": "trn1.32xlarge"}, "this machine is trn1.32xlarge"),
    (TRN1, {"python": "3.14.1"}, "for Python 3.11 to 3.13"),
    (TRN2, {"python": "3.11.7"}, "for Python 3.12 to 3.14"),
    (TRN2 | {"neuronx-cc": None}, {}, "not the compiler"),
    (TRN1 | {"neuronx-cc": "2.27.5334.0", "nki": "0.6.0", "numpy": "2.3.1"}, {}, "those have 2.23 to 2.26"),
    (TRN2 | {"neuronx-cc": "2.26.6360.0", "nki": "0.5.0"}, {}, "neuronx-cc 2.26.6360.0 is older"),
    (TRN1 | {"libneuronxla": "3.0.10135.0"}, {}, "is the one for JAX"),
    (TRN1 | {"nki": "0.2.0"}, {}, "nki 0.2.0 is not of the same SDK as neuronx-cc 2.26.6360.0"),
    ({"numpy": "1.26.4", "pyarrow": "26.0.1"}, {}, "pyarrow 26.0.1 refuses numpy 1.26.4"),
    (TRN2 | {"numpy": "2.1.3"}, {}, "and this is 2.1.3"),
    (TRN2 | {"numpy": "2.4.6"}, {}, "and this is 2.4.6"),
    ({}, {"variables": {"XLA_USE_BF16": "1"}}, "Adam's moments too"),
    ({}, {"variables": {"XLA_DOWNCAST_BF16": "1"}}, "Adam's moments too"),
    ({}, {"variables": {"NEURON_CC_FLAGS": "-O1 --auto-cast=all"}}, "--auto-cast all"),
    ({}, {"variables": {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}}, "meaningless"),
    (TRN1, {"variables": {"PJRT_DEVICE": "CPU"}}, "PJRT_DEVICE is CPU"),
    ({}, {"variables": {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": ""}}, "TPU_ACCELERATOR_TYPE empty"),
    ({}, {"problems": ("SSM_TRN_NEURON is 'gpu': make it one of native",)}, "SSM_TRN_NEURON is 'gpu'"),
]
NOTES = [
    (TRN1, {"instance": "trn1.2xlarge"}, "kernels of nki 0.5.0"),
    (TRN1, {"variables": {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3"}}, "no effect since SDK 2.31"),
    ({}, {"variables": {"OMP_NUM_THREADS": "8"}}, "OMP_NUM_THREADS is 8"),
    ({}, {"variables": {"OMP_WAIT_POLICY": "active"}}, "idle threads spin"),
]
GOOD = [
    ({}, {}),
    (TRN1, {"instance": "trn2.48xlarge", "variables": {"PJRT_DEVICE": "NEURON", "OMP_NUM_THREADS": "4"}}),
    (
        TRN1 | {"torch-neuronx": "2.9.0.2.12.22436", "neuronx-cc": "2.23.6484.0", "nki": "0.2.0"},
        {"instance": "trn1.2xlarge"},
    ),
    (TRN2 | {"numpy": "2.3.5"}, {"instance": "trn2.48xlarge"}),
    ({"torch": "2.13.0+cpu", "numpy": "2.4.6", "pyarrow": "26.0.1", "lightning": "2.6.6"}, {}),
    ({}, {"variables": {"XLA_USE_BF16": "0", "NEURON_CC_FLAGS": "--auto-cast=none", "OMP_NUM_THREADS": "4,2"}}),
]


def environment(versions, facts):
    present = {name: version for name, version in versions.items() if version is not None}
    return Environment(**{"versions": present, "cpu_cores": 4} | facts)


@pytest.mark.parametrize(("versions", "facts", "words"), FAULTS + NOTES)
def test_each_rule_finds_its_fault_and_no_other(versions, facts, words):
    (fault,) = faults_of(environment(versions, facts))
    assert words in fault.what and "{" not in fault.what + fault.mend and fault.mend
    assert fault.is_fatal == ((versions, facts, words) in FAULTS)


def test_every_rule_has_a_case():
    found = [environment(versions, facts) for versions, facts, _ in FAULTS + NOTES]
    assert all(any(rule.applies(each) for each in found) for rule in RULES)


@pytest.mark.parametrize(("versions", "facts"), GOOD)
def test_good_environments_have_no_fault(versions, facts):
    assert faults_of(environment(versions, facts)) == []


@pytest.mark.parametrize("name", FILES)
def test_what_constraints_pin_has_no_fault(name):
    versions = {package: str(version) for package, version in pins(name).items()}
    assert faults_of(Environment(versions=versions)) == []


def test_the_compilers_of_the_constraints_stand_in_the_table_with_their_nki():
    for name in FILES:
        pinned = pins(name)
        if "nki" in pinned:
            compiler, nki = (".".join(map(str, pinned[each].release[:2])) for each in ("neuronx-cc", "nki"))
            assert NKI_OF_COMPILER[compiler] == nki


def test_what_the_mends_name_exists():
    mends = " ".join(rule.mend for rule in RULES)
    files = {word for word in mends.replace(";", " ").split() if word.startswith("constraints/") and ".txt" in word}
    assert files and all((ROOT / file.rstrip(".")).exists() for file in files)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"neuron", "neuron-xla"} <= extras.keys() and ".[neuron]" in mends and ".[neuron-xla]" in mends


def test_faults_come_first_and_decide_the_exit_status(monkeypatch, capsys):
    bad = environment({"lightning": "2.6.3"}, {"variables": {"OMP_WAIT_POLICY": "ACTIVE"}})
    monkeypatch.setattr(doctor, "look", lambda: bad)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert shown.index("WRONG: lightning 2.6.3") < shown.index("note: OMP_WAIT_POLICY")
    assert "variable       OMP_WAIT_POLICY=ACTIVE" in shown
    monkeypatch.setattr(doctor, "look", lambda: environment({}, {"variables": {"OMP_WAIT_POLICY": "ACTIVE"}}))
    assert main(["doctor"]) == 0
    assert "note:" in capsys.readouterr().out


def test_this_environment(capsys, monkeypatch):
    monkeypatch.delenv("SSM_TRN_NEURON", raising=False)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "there is no NeuronCore" in shown and "lightning 2." in shown and "No combination here" in shown
    monkeypatch.setenv("SSM_TRN_NEURON", "gpu")
    assert main(["doctor"]) == 1
    assert "WRONG: SSM_TRN_NEURON is 'gpu'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, doctor.DEFAULT_CACHE),
        ({"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"}, "s3://bucket/cache"),
        ({"NEURON_COMPILE_CACHE_URL": "/a", "NEURON_CC_FLAGS": "-O1 --cache_dir=/b"}, "/b"),
        ({"NEURON_CC_FLAGS": "--cache_dir '/with space' -O1"}, "/with space"),
        ({"NEURON_CC_FLAGS": "--cache_dir=/b -O'1"}, "/b"),  # a quote that does not end
    ],
)
def test_where_the_compile_cache_is(variables, place):
    assert doctor.cache_folder(variables) == place


def test_a_compile_cache_that_cannot_be_read_is_told():
    name = "x" * 5000
    assert doctor.describe_cache({"NEURON_COMPILE_CACHE_URL": name}) == f"{name} cannot be read: File name too long"


def test_the_compile_cache_in_words(tmp_path):
    cache = tmp_path / "cache"
    assert f"{cache}: not there yet; " in doctor.describe_cache({"NEURON_COMPILE_CACHE_URL": str(cache)})
    (cache / "neuronxcc-2.26" / "MODULE_1").mkdir(parents=True)
    (cache / "neuronxcc-2.26" / "MODULE_1" / "model.neff").write_bytes(bytes(2**20))
    assert "1 compiled graphs, 0.0 GiB; " in doctor.describe_cache({"NEURON_COMPILE_CACHE_URL": str(cache)})
    assert doctor.describe_cache({"NEURON_COMPILE_CACHE_URL": "s3://b/c"}) == "s3://b/c (not looked at)"
