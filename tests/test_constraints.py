"""What pyproject and constraints/ say of versions fits together, and keeps out what must not be installed."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {  # of constraints/, each with the extra that it is for
    "cpu": None,
    "xla-cpu": "xla-cpu",
    "trn1-sdk2.28": "neuron-xla",
    "trn1-sdk2.31": "neuron-xla",
    "trn2-sdk2.33": "neuron",
}
NEURON_FILES = [name for name in FILES if name.startswith("trn")]
NEURON_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
PLACEHOLDERS = {  # what PyPI has under the names of Neuron's packages: they raise an error when imported
    "torch-neuronx": "1.0",
    "neuronx-cc": "1.0.post1",
    "libneuronxla": "1.0",
    "nki": "0.0.1",
    "neuronx-distributed": "0.1",
}
MALICIOUS = ("2.6.2", "2.6.3")  # of lightning: GHSA-w37p-236h-pfx3


def requirements(lines):
    return {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}


def lines_of(name):
    return [line for line in (ROOT / "constraints" / f"{name}.txt").read_text().splitlines() if line]


def pins(name):
    """The version of each package that the file of that name names; 1.2.* is read as 1.2."""
    listed = [Requirement(line) for line in lines_of(name) if not line.startswith(("#", "--"))]
    versions = {each.name: re.fullmatch(r"==([\d.]+?)(\.\*)?", str(each.specifier)) for each in listed}
    assert all(versions.values()) and len(versions) == len(listed)
    return {package: Version(version[1]) for package, version in versions.items()}


BASE = requirements(PROJECT["dependencies"])
EXTRAS = {name: requirements(lines) for name, lines in PROJECT["optional-dependencies"].items()}


def test_each_file_stands_in_the_list_above():
    assert {path.stem for path in (ROOT / "constraints").glob("*.txt")} == {*FILES, "demo"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_satisfies_the_base_requirements_and_its_extra(name):
    pinned, extra = pins(name), EXTRAS.get(FILES[name], {})
    assert extra.keys() - {"numpy"} <= pinned.keys()
    for wanted in (BASE, extra, EXTRAS["hf"], EXTRAS["dev"]):
        for package in wanted.keys() & pinned.keys():
            assert wanted[package].contains(pinned[package]), package


@pytest.mark.parametrize("name", NEURON_FILES)
def test_a_file_for_trainium_says_where_its_packages_and_facts_come_from(name):
    lines = lines_of(name)
    assert NEURON_INDEX in lines
    assert f"#     pip install -c constraints/{name}.txt -e '.[{FILES[name]}]'" in lines
    comments = " ".join(line for line in lines if line.startswith("#"))
    assert "Source" in comments and re.search(r"SDK \d\.\d+\.\d \(20\d\d-\d\d-\d\d\)", comments)


@pytest.mark.parametrize("name", ["trn1-sdk2.28", "trn1-sdk2.31"])
def test_the_two_products_called_torch_neuronx_do_not_fit_each_others_extra(name):
    xla, native = pins(name)["torch-neuronx"], pins("trn2-sdk2.33")["torch-neuronx"]
    assert not EXTRAS["neuron"]["torch-neuronx"].contains(xla)
    assert not EXTRAS["neuron-xla"]["torch-neuronx"].contains(native)


@pytest.mark.parametrize("package", PLACEHOLDERS)
def test_no_extra_takes_a_placeholder(package):
    wanted = [extra[package] for extra in EXTRAS.values() if package in extra]
    assert package == "neuronx-distributed" or wanted
    assert not any(specifier.contains(PLACEHOLDERS[package]) for specifier in wanted)


def test_the_base_requirements_leave_neuron_and_numpy_alone():
    assert not BASE.keys() & PLACEHOLDERS.keys()
    assert not BASE["numpy"]  # AWS's compilers decide


@pytest.mark.parametrize("version", MALICIOUS)
def test_malicious_releases_of_lightning_are_kept_out(version):
    assert not BASE["lightning"].contains(version)
    assert all(str(pins(name).get("lightning")) != version for name in FILES)
