"""`ssm-trn doctor`: what this environment can train on, and the combinations in it that are known not to work.

It looks without starting anything: versions come from the metadata of packages, and what it must import it may find
broken. The combinations are in ssm_trn.known_faults.
"""

import argparse
import os
import platform
import shlex
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ssm_trn.known_faults import Environment, Fault, faults_of
from ssm_trn.version import VERSION

PACKAGES = ["torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "nki", "neuronx-distributed"]
PACKAGES += ["lightning", "jsonargparse", "numpy", "pyarrow", "transformers", "lm-eval"]
# What decides how a training on Trainium runs; the first name of a family stands for all that begin with it.
VARIABLES = ("SSM_TRN_", "NEURON_", "PJRT_", "TPU_", "XLA_", "FI_", "CCOM_", "OMP_", "TORCHELASTIC_", "MALLOC_ARENA_")
DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"
_INSTANCE_FILE = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2's machines it holds the instance type


def run(words: Sequence[str]) -> None:
    """The command: prints what `report` gives, and ends with status 1 if a combination is known not to work."""
    description = "Says what this environment can train on, and names known-bad combinations with the mend."
    argparse.ArgumentParser("ssm-trn doctor", description=description).parse_args(words)
    environment = look()
    faults = faults_of(environment)
    print(report(environment, faults))
    raise SystemExit(int(any(fault.is_fatal for fault in faults)))


def look() -> Environment:
    """The environment of this process."""
    variables = dict(os.environ)  # before torch is imported, as imports set some
    problems: list[str] = []
    flavour = absence = None
    neuron_cores, gpus = 0, []
    try:
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        problems.append(f"torch cannot be imported ({_in_short(error)}): install it again")
    else:
        try:
            from ssm_trn import accelerators
            from ssm_trn.accelerators.accelerator import core_count

            flavour = accelerators.flavour()
            absence = None if flavour else accelerators.absence()
            neuron_cores = core_count() if flavour else 0
        except ValueError as error:  # a setting of the user
            problems.append(str(error))
        except Exception as error:
            problems.append(f"the search for NeuronCores ended in an error: {_in_short(error)}")
    return Environment(
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := _version(name))},
        variables=variables,
        instance=_INSTANCE_FILE.read_text().strip() if os.access(_INSTANCE_FILE, os.R_OK) else "",
        flavour=flavour,
        absence=absence,
        neuron_cores=neuron_cores,
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=tuple(gpus),
        problems=tuple(problems),
    )


def report(environment: Environment, faults: Sequence[Fault]) -> str:
    """What `ssm-trn doctor` prints, without a line break at the end."""
    machine = " ".join(filter(None, (platform.system(), platform.machine(), environment.instance)))
    rows = [
        ("ssm_trn", f"{VERSION}, Python {environment.python}, {machine}"),
        ("flavour", environment.flavour or f"none: {environment.absence or 'not known'}"),
        ("NeuronCores", str(environment.neuron_cores)),
        ("GPUs", ", ".join(environment.gpus) or "0"),
        ("CPU cores", str(environment.cpu_cores)),
        ("packages", ", ".join(f"{name} {version}" for name, version in environment.versions.items())),
        ("not installed", ", ".join(name for name in PACKAGES if name not in environment.versions)),
        ("compile cache", describe_cache(environment.variables)),
    ]
    names = sorted(name for name in environment.variables if name.startswith(VARIABLES))
    rows += [("variable", f"{name}={environment.variables[name]}") for name in names]
    lines = [f"{name:14} {text}" for name, text in rows if text]
    lines.append("")
    if not faults:
        lines.append("No combination here is known not to work.")
    for fault in faults:
        lines += [f"{'WRONG' if fault.is_fatal else 'note'}: {fault.what}", f"    {fault.mend}"]
    return "\n".join(lines)


def cache_folder(variables: Mapping[str, str]) -> str:
    """Where the Neuron compiler keeps what it compiled: a path or a URL. As AWS says, --cache_dir goes first."""
    flags = variables.get("NEURON_CC_FLAGS", "")
    try:
        words = iter(shlex.split(flags))
    except ValueError:  # a quote that does not end
        words = iter(flags.split())
    for word in words:
        name, _, value = word.partition("=")
        if name == "--cache_dir":
            return value or next(words, DEFAULT_CACHE)
    return variables.get("NEURON_COMPILE_CACHE_URL") or DEFAULT_CACHE


def describe_cache(variables: Mapping[str, str]) -> str:
    """The compile cache in words: the path, what it holds, and how much the disk still takes."""
    place = cache_folder(variables)
    if "://" in place:
        return f"{place} (not looked at)"
    folder = Path(place)
    try:
        graphs = sum(1 for _ in folder.rglob("*.neff"))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(above).free
    except OSError as error:
        return f"{place} cannot be read: {error.strerror}"
    content = f"{graphs} compiled graphs, {size / 2**30:.1f} GiB" if folder.exists() else "not there yet"
    return f"{place}: {content}; {free / 2**30:.0f} GiB free"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _in_short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
