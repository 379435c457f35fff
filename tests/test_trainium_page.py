"""What docs/trainium.md and launch/README.md say fits the files that they speak of, and their commands run."""

import re
import shlex

import pytest

from ssm_trn.cli import main
from tests.test_constraints import NEURON_FILES, ROOT, lines_of, pins

PAGES = {name: (ROOT / name).read_text() for name in ("docs/trainium.md", "launch/README.md")}
TEXT = "".join(PAGES.values())
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (.*)", TEXT, re.MULTILINE)]


def test_the_commands_name_what_there_is():
    words = {word for command in COMMANDS for word in command}
    paths = {word for word in words if re.match(r"(launch|experiments|constraints|configs)/", word)}
    assert len(paths) >= 7 and all((ROOT / path).exists() for path in paths)
    makefile = (ROOT / "Makefile").read_text()
    targets = {command[1] for command in COMMANDS if command[0] == "make"} | set(re.findall(r"`make ([\w-]+)`", TEXT))
    assert "test-neuron" in targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_each_install_is_that_of_its_file():
    installs = [shlex.join(command) for command in COMMANDS if command[:2] == ["pip", "install"]]
    assert len(installs) == 3
    for install in installs:
        name = re.search(r"constraints/(.+)\.txt", install)[1]
        assert any(
            line.startswith("#     pip") and shlex.split(line[6:]) == shlex.split(install) for line in lines_of(name)
        )


def test_the_doctor_runs_as_the_page_says(monkeypatch, capsys):
    monkeypatch.delenv("SSM_TRN_NEURON", raising=False)
    commands = [command[command.index("ssm-trn") + 1 :] for command in COMMANDS if "ssm-trn" in command]
    assert commands == [["doctor"]] * 3
    assert main(commands[0]) == 0
    assert "flavour" in capsys.readouterr().out


@pytest.mark.parametrize(("column", "name"), list(enumerate(NEURON_FILES)))
def test_the_table_of_sdks_is_that_of_the_constraints(column, name):
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| ")]
    table = {row[0]: row[column + 1] for row in rows if len(row) == 4}
    assert table["file in `constraints/"] == f"{name}.txt"
    pinned = pins(name)
    for package in ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "nki"):
        assert table[package] == str(pinned.get(package, ""))
    assert table["Neuron SDK"] in " ".join(lines_of(name))
