"""Combinations of packages and settings that are known not to work on Trainium, each with the mend.

Sources are named beside a rule where it is not the package's own metadata: AWS's pages of the Neuron SDK, issues of
projects. docs/trainium.md explains more.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version

XLA = ">=2,<2.10"  # of torch-neuronx: the product on torch-xla, for trn1
NATIVE = ">=2.13"  # of torch-neuronx: TorchNeuron, for trn2 and trn3
# The compiler of each SDK and the NKI that it asks for. AWS's release manifests 2.28.1 to 2.33.0.
NKI_OF_COMPILER = {"2.23": "0.2", "2.24": "0.3", "2.25": "0.4", "2.26": "0.5", "2.27": "0.6", "2.28": "0.7"}
_REINSTALL = "pip install -c constraints/{file} -e '.[{extra}]'"
_REINSTALL_TRN1 = _REINSTALL.format(file="trn1-sdk2.28.txt", extra="neuron-xla")
_REINSTALL_TRN2 = _REINSTALL.format(file="trn2-sdk2.33.txt", extra="neuron")


@dataclass(frozen=True)
class Environment:
    """What rules look at. `versions` has the packages that are installed, `problems` what broke while it was found."""

    python: str = "3.12.0"
    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    instance: str = ""
    flavour: str | None = None
    absence: str | None = None
    neuron_cores: int = 0
    cpu_cores: int = 1
    gpus: Sequence[str] = ()
    problems: Sequence[str] = ()

    def has(self, package: str, specifier: str = "") -> bool:
        """Whether the package is installed in such a version."""
        version = self.versions.get(package)
        return version is not None and SpecifierSet(specifier, prereleases=True).contains(version)

    def lacks(self, package: str, specifier: str) -> bool:
        """Whether the package is installed, but in no such version."""
        return self.has(package) and not self.has(package, specifier)

    def release(self, package: str) -> str:
        """The first two numbers of a package's version, as in 2.9; empty if it is not installed."""
        return ".".join(map(str, Version(self.versions[package]).release[:2])) if self.has(package) else ""

    def is_set(self, variable: str) -> bool:
        return self.variables.get(variable, "") not in ("", "0")


@dataclass(frozen=True)
class Fault:
    """What is wrong and the mend, a sentence each. One that is not fatal is worth knowing, but may be meant."""

    what: str
    mend: str
    is_fatal: bool = True


@dataclass(frozen=True)
class Rule:
    """A fault that is there where `applies` says so. In its sentences {torch} is the version, {HOME} the variable."""

    applies: Callable[[Environment], bool]
    what: str
    mend: str
    is_fatal: bool = True

    def fault(self, environment: Environment) -> Fault:
        values = {
            "python": environment.python,
            "instance": environment.instance,
            **environment.variables,
            **environment.versions,
        }
        what, mend = (
            re.sub(r"\{([\w-]+)\}", lambda match: values.get(match[1], "none"), text) for text in (self.what, self.mend)
        )
        return Fault(what, mend, self.is_fatal)


def _placeholder(package: str, below: str) -> Rule:
    return Rule(
        lambda e: e.has(package, f"<{below}"),
        f"{package} {{{package}}} is the empty package that PyPI has under this name.",
        f"pip uninstall -y {package}, then install with your machine's file in constraints/, which names AWS's index.",
    )


def _python_is(environment: Environment, specifier: str) -> bool:
    return SpecifierSet(specifier, prereleases=True).contains(environment.python)


RULES: tuple[Rule, ...] = (
    Rule(
        lambda e: e.has("lightning", "==2.6.2") or e.has("lightning", "==2.6.3"),
        "lightning {lightning} was a malicious release that steals credentials (GHSA-w37p-236h-pfx3).",
        "Remove this environment, change every password and key that this machine held, and install lightning 2.6.6.",
    ),
    _placeholder("torch-neuronx", "2"),
    _placeholder("neuronx-cc", "2"),
    _placeholder("libneuronxla", "2"),
    _placeholder("nki", "0.1"),
    _placeholder("neuronx-distributed", "0.2"),
    Rule(
        lambda e: e.has("torch-xla") and e.release("torch-xla") != e.release("torch"),
        "torch-xla {torch-xla} cannot be imported beside torch {torch}: both must be the same release.",
        "pip uninstall -y torch-xla where nothing needs it; else make an environment with constraints/xla-cpu.txt.",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", ">=2") and e.release("torch-neuronx") != e.release("torch"),
        "torch-neuronx {torch-neuronx} is made for the torch of the same release, not for {torch}.",
        f"On trn1 {_REINSTALL_TRN1}; on trn2 and trn3 {_REINSTALL_TRN2}; each in a new virtual environment.",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", XLA) and not e.has("torch-xla"),
        "torch-neuronx {torch-neuronx} runs on torch-xla, which is not installed.",
        f"{_REINSTALL_TRN1}",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", NATIVE) and (e.has("torch-xla") or e.has("libneuronxla", "<3")),
        "Parts of both products called torch-neuronx are here: TorchNeuron {torch-neuronx}, and of the other torch-xla "
        "{torch-xla} or libneuronxla {libneuronxla}.",
        "Give each a virtual environment of its own: they cannot share one.",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", NATIVE) and e.instance.startswith(("trn1", "inf2")),
        "torch-neuronx {torch-neuronx} is TorchNeuron, which AWS made for trn2 and trn3; this machine is {instance}.",
        f"In a new virtual environment {_REINSTALL_TRN1}",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", XLA) and not _python_is(e, ">=3.10,<3.14"),
        "AWS has torch-neuronx {torch-neuronx} for Python 3.11 to 3.13 (SDK 2.28: to 3.12), and this is {python}.",
        "Make the virtual environment with Python 3.12.",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", NATIVE) and not _python_is(e, ">=3.12,<3.15"),
        "AWS has TorchNeuron {torch-neuronx} for Python 3.12 to 3.14, and this is {python}.",
        "Make the virtual environment with Python 3.12.",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", ">=2") and not e.has("neuronx-cc"),
        "torch-neuronx {torch-neuronx} is here, but not the compiler neuronx-cc.",
        f"On trn1 {_REINSTALL_TRN1}; on trn2 and trn3 {_REINSTALL_TRN2}",
    ),
    Rule(  # its own bound lets pip take 2.27 and newer, which users found to fail
        lambda e: e.has("torch-neuronx", XLA) and e.has("neuronx-cc", ">=2") and e.lacks("neuronx-cc", ">=2.23,<2.27"),
        "neuronx-cc {neuronx-cc} is not of an SDK that ships torch-neuronx {torch-neuronx}: those have 2.23 to 2.26.",
        f"{_REINSTALL_TRN1}",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", NATIVE) and e.has("neuronx-cc", ">=2,<2.28"),
        "neuronx-cc {neuronx-cc} is older than TorchNeuron {torch-neuronx}, which came with 2.28.",
        f"{_REINSTALL_TRN2}",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", XLA) and e.has("libneuronxla", ">=3"),
        "libneuronxla {libneuronxla} is the one for JAX; torch-neuronx {torch-neuronx} needs 2.2.",
        f"{_REINSTALL_TRN1}",
    ),
    Rule(
        lambda e: (
            e.has("nki", ">=0.1") and NKI_OF_COMPILER.get(e.release("neuronx-cc"), e.release("nki")) != e.release("nki")
        ),
        "nki {nki} is not of the same SDK as neuronx-cc {neuronx-cc}.",
        "Install both with one of the files in constraints/.",
    ),
    Rule(  # "NKI 0.3.0 kernels are not supported on Trn1": AWS, release notes of NxD Inference, SDK 2.29
        lambda e: e.has("torch-neuronx", XLA) and e.has("nki", ">=0.3") and e.instance.startswith("trn1"),
        "AWS supports the kernels of nki {nki} on trn2 and trn3 only; its compiler still takes them for trn1.",
        f"If they fail to compile, {_REINSTALL_TRN1}",
        is_fatal=False,
    ),
    Rule(  # pyarrow's own check at import
        lambda e: e.has("numpy", "<2") and e.has("pyarrow", ">=26"),
        "pyarrow {pyarrow} refuses numpy {numpy}, and with it the data sets do not load.",
        "pip install pyarrow==25.0.0",
    ),
    Rule(  # AWS, what's new in SDK 2.32
        lambda e: e.has("neuronx-cc", ">=2.27") and e.lacks("numpy", ">=2.2,<2.4"),
        "AWS supports numpy 2.2 and 2.3 with neuronx-cc {neuronx-cc}, and this is {numpy}.",
        "pip install 'numpy==2.3.*'",
    ),
    Rule(  # AWS, announce-eos-xla-bf16; torch-xla turns every float32 tensor into bfloat16, the optimizer's too
        lambda e: e.is_set("XLA_USE_BF16") or e.is_set("XLA_DOWNCAST_BF16"),
        "XLA_USE_BF16 or XLA_DOWNCAST_BF16 is set: all that says float32 would be bfloat16, Adam's moments too.",
        "Unset it, and ask for --trainer.precision bf16-mixed or bf16-true.",
    ),
    Rule(
        lambda e: re.search(r"--auto-cast[= ]all\b", e.variables.get("NEURON_CC_FLAGS", "")) is not None,
        "NEURON_CC_FLAGS has --auto-cast all: gates and states, which must be float32, would be bfloat16.",
        "Take it out, and ask for --trainer.precision bf16-mixed or bf16-true.",
    ),
    Rule(
        lambda e: e.is_set("NEURON_EXTRACT_GRAPHS_ONLY"),
        "NEURON_EXTRACT_GRAPHS_ONLY is set: graphs are collected, and every number that comes out is meaningless.",
        "Unset it; neuron_parallel_compile sets it for the one command that it runs.",
    ),
    Rule(
        lambda e: e.has("torch-neuronx", XLA) and e.variables.get("PJRT_DEVICE", "NEURON") != "NEURON",
        "PJRT_DEVICE is {PJRT_DEVICE}, so XLA's device would be no NeuronCore.",
        "Unset it, or set it to NEURON.",
    ),
    Rule(  # with both, torch_xla does not ask a server of Google's, 5 seconds at every start
        lambda e: e.is_set("TPU_SKIP_MDS_QUERY") and e.variables.get("TPU_ACCELERATOR_TYPE") == "",
        "TPU_SKIP_MDS_QUERY is set and TPU_ACCELERATOR_TYPE empty, at which Lightning's search for TPUs fails.",
        "Unset both: ssm_trn sets them itself.",
    ),
    Rule(  # AWS, announce-no-support-implicit-async-mode
        lambda e: e.has("neuronx-cc", ">=2.26") and e.is_set("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"),
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS has no effect since SDK 2.31, and gives warnings.",
        "Unset it.",
        is_fatal=False,
    ),
    Rule(
        lambda e: int(re.sub(r"\D.*", "", e.variables.get("OMP_NUM_THREADS", "")) or 0) > e.cpu_cores,
        "OMP_NUM_THREADS is {OMP_NUM_THREADS}, more than there are CPU cores, so that threads wait for one another.",
        "Unset it, or set it to the number of cores for each process.",
        is_fatal=False,
    ),
    Rule(
        lambda e: e.variables.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE",
        "OMP_WAIT_POLICY is ACTIVE: idle threads spin, which slows small operators down where CPUs are shared.",
        "Unset it: ssm-trn sets PASSIVE.",
        is_fatal=False,
    ),
)


def faults_of(environment: Environment) -> list[Fault]:
    """The faults of an environment, the fatal ones first."""
    found = [Fault(problem, "Nothing else can be said until this is mended.") for problem in environment.problems]
    found += [rule.fault(environment) for rule in RULES if rule.applies(environment)]
    return sorted(found, key=lambda fault: not fault.is_fatal)
