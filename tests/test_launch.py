"""The scripts in launch/, with recorders in place of SLURM and Neuron's compiler; with a real torchrun on the CPU."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from ssm_trn.cli import main
from ssm_trn.training.faults import STOPPED
from tests.training.tiny import prepare_data, write_config

ROOT = Path(__file__).parents[1]
SCRIPTS = ["launch/torchrun.sh", "launch/trn1_slurm.sbatch"]
WORDS = ["fit", "--config", "my experiments/a b.yaml", "--run_folder", "runs/it's $HOME", "--data", '{"a": "*"}']
RECORDED = (
    "NNODES",
    "MASTER_ADDR",
    "CORES",
    "SLURM_NODEID",
    "NEURON_COMPILE_CACHE_URL",
    "NEURON_CC_FLAGS",
    "FI_PROVIDER",
)

# Each writes a line of its name, arguments and environment; srun then runs its command once for each node.
RECORDER = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
kept = {{variable: os.environ.get(variable) for variable in {RECORDED!r}}}
with open(os.environ["RECORD"], "a") as file:
    print(json.dumps([name, words, kept]), file=file)
if name == "scontrol" and words[:2] == ["show", "hostnames"]:
    print("\\n".join(f"node-{{i}}" for i in range(int(os.environ["SLURM_JOB_NUM_NODES"]))))
elif name == "srun":
    nodes = range(int(os.environ["SLURM_JOB_NUM_NODES"]))
    sys.exit(max(subprocess.run(words[1:], env=os.environ | {{"SLURM_NODEID": str(i)}}).returncode for i in nodes))
elif name == "neuron_parallel_compile":
    sys.exit(subprocess.run(words).returncode)
elif name == "python":
    sys.exit(int(os.environ["STATUS"]))
"""


@pytest.fixture
def record(tmp_path):
    """Runs a script among the recorders; gives its exit status, and of each recorder the calls: words, environment."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("srun", "scontrol", "neuron_parallel_compile", "python"):
        (stubs / name).write_text(RECORDER)
        (stubs / name).chmod(0o755)

    def run(script, *words, status=0, **variables):
        path = tmp_path / "record"
        path.unlink(missing_ok=True)
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        environment = kept | {"PATH": f"{stubs}:/usr/bin:/bin", "RECORD": str(path), "STATUS": str(status)} | variables
        done = subprocess.run([script, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        by_name = {name: [call[1:] for call in calls if call[0] == name] for name in {call[0] for call in calls}}
        return SimpleNamespace(status=done.returncode, stderr=done.stderr, calls=by_name)

    return run


def slurm(nodes):
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node-[0-9]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_SUBMIT_DIR": "/shared/ssm trn",
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_clean(script):
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    assert os.access(ROOT / script, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("nodes", [1, 4])
def test_slurm_starts_torchrun_on_each_node_with_the_very_words(nodes, record):
    ran = record("launch/trn1_slurm.sbatch", *WORDS, **slurm(nodes))
    assert ran.status == 0, ran.stderr
    ((srun, _),) = ran.calls["srun"]
    assert srun == ["--wait=300", "launch/torchrun.sh", *WORDS]
    for rank, (words, environment) in enumerate(ran.calls["python"]):
        options = dict(zip(words[1:11:2], words[2:11:2], strict=True))
        assert words[0] == "launch/torchrun.py"
        assert options == {
            "--nproc_per_node": "32",
            "--nnodes": str(nodes),
            "--node_rank": str(rank),
            "--master_addr": "node-0",
            "--master_port": "41000",
        }
        assert words[11:] == ["-m", "ssm_trn", *WORDS, "--ckpt_path", "last"]
        assert environment["NEURON_COMPILE_CACHE_URL"] == "/shared/ssm trn/neuron-compile-cache"
        assert environment["NEURON_CC_FLAGS"].split() == ["--retry_failed_compilation"]
        assert environment["FI_PROVIDER"] == (None if nodes == 1 else "efa")
    assert len(ran.calls["python"]) == nodes
    assert [words for words, _ in ran.calls["scontrol"]] == [["show", "hostnames", "node-[0-9]"]]


@pytest.mark.parametrize(("status", "requeues"), [(0, False), (1, False), (2, False), (STOPPED, True)])
def test_slurm_queues_again_what_was_stopped_and_saved_and_nothing_else(status, requeues, record):
    ran = record("launch/trn1_slurm.sbatch", "fit", status=status, **slurm(2))
    assert ran.status == status
    assert (["requeue", "17"] in [words for words, _ in ran.calls["scontrol"]]) == requeues


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_compile_pass_runs_each_node_under_the_compiler_in_a_folder_that_goes_away(nodes, record):
    ran = record("launch/trn1_slurm.sbatch", *WORDS, COMPILE="1", CORES="2", NEURON_CC_FLAGS="-O1", **slurm(nodes))
    assert ran.status == 0, ran.stderr
    for (compiled, environment), (words, _) in zip(
        ran.calls["neuron_parallel_compile"], ran.calls["python"], strict=True
    ):
        assert compiled == ["python", *words]
        assert "--ckpt_path" not in words and words[-1] == "true"
        assert words[words.index("--trainer.max_steps") + 1] == "4"
        folder = Path(words[len(words) - 1 - words[::-1].index("--run_folder") + 1])
        assert folder.name == "run" and not folder.parent.exists()
        assert environment["NEURON_CC_FLAGS"].split() == ["-O1", "--retry_failed_compilation"]
    assert len(ran.calls["python"]) == nodes


def test_a_failing_compile_pass_is_told(record):
    assert record("launch/torchrun.sh", "fit", COMPILE="1", CORES="2", status=3).status == 3


def test_one_machine(record):
    ran = record("launch/torchrun.sh", "validate", "--config", "a b", CORES="2")
    ((words, environment),) = ran.calls["python"]
    assert ran.status == 0 and words[-5:] == ["-m", "ssm_trn", "validate", "--config", "a b"]
    assert words[words.index("--nnodes") + 1] == "1" and environment["FI_PROVIDER"] is None
    without = record("launch/torchrun.sh", "fit", CORES="0")
    assert without.status == 2 and "there are no NeuronCores here" in without.stderr and not without.calls


def test_the_kubernetes_template():
    service, job = yaml.safe_load_all((ROOT / "launch" / "eks_job.yaml").read_text())
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"])
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    limits = container["resources"]["limits"]
    assert (
        int(variables["CORES"]) == 2 * limits["aws.amazon.com/neuron"] and limits == container["resources"]["requests"]
    )
    codes = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert codes == {STOPPED: "Ignore", 2: "FailJob"}
    script, command, _, config = container["command"]
    assert (ROOT / script).exists() and command == "fit" and (ROOT / config).exists()


def test_the_status_of_stopped_runs_is_that_of_the_training():
    assert f"STOPPED={STOPPED} " in (ROOT / "launch" / "trn1_slurm.sbatch").read_text()


@pytest.mark.parametrize(("exitcode", "status"), [(STOPPED, STOPPED), (1, 1), (-signal.SIGKILL, 137)])
def test_torchrun_ends_with_the_status_of_what_failed(exitcode, status, monkeypatch):
    found = importlib.util.spec_from_file_location("launch_torchrun", ROOT / "launch" / "torchrun.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    failure = SimpleNamespace(exitcode=exitcode, local_rank=0)

    def fail():
        error = module.ChildFailedError.__new__(module.ChildFailedError)
        error.get_first_failure = lambda: (0, failure)
        raise error

    monkeypatch.setattr(module.run, "main", fail)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == status


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_config(folder / "config.yaml", prepare_data(folder))


def test_what_the_compile_pass_adds_to_a_command_is_what_fit_takes(config, record):
    ran = record("launch/torchrun.sh", "fit", "--config", config, "--run_folder", "runs/mine", COMPILE="1", CORES="1")
    ((words, _),) = ran.calls["python"]
    assert main(words[words.index("ssm_trn") + 1 :]) == 0
    folder = Path(words[len(words) - words[::-1].index("--run_folder")])
    assert folder.exists()
    shutil.rmtree(folder.parent)


def test_processes_that_are_told_to_stop_save_and_end(config, tmp_path):
    environment = os.environ | {"CORES": "2", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(_free_port())}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    words = ["fit", "--config", config, "--run_folder", "run", "--trainer.max_steps", "100000"]
    process = subprocess.Popen(
        [ROOT / "launch" / "torchrun.sh", *words], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    metrics, begun = tmp_path / "run" / "metrics.csv", time.monotonic()
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert process.poll() is None and time.monotonic() - begun < 240, process.communicate()[1]
        time.sleep(0.2)
    process.terminate()
    told = process.communicate(timeout=120)[1]
    assert process.returncode == STOPPED, told
    (step,) = re.findall(r"told to stop after step (\d+);", told)
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == int(step)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
