"""`ssm-trn plan EXPERIMENT.yaml`: what a training needs on trn1, in bytes and in hours, before a machine is paid for.

python -m ssm_trn.plan experiments/trn1_*.yaml --into docs/trn1_runs/README.md    its tables between the markers

Counted on the real module without memory: parameters, operations, and what a forward pass keeps for the backward pass.
Modelled, and called so: the hours, from an assumed share of the peak that the cores reach. Nothing here was measured on
a Trainium; a compiler may keep less than counted, by computing anew, or more, for what it lays out twice.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ssm_trn.config import ModelConfig
from ssm_trn.files import read_piece, write_whole
from ssm_trn.model import LanguageModel
from ssm_trn.results import into_markers, markdown_table

GIB = 2**30
CORE_MEMORY = 16 * GIB  # a Trainium chip has 32 GiB and two cores
CORE_PEAK = 95e12  # dense bfloat16 operations a second; a chip has 190 TFLOP/s
MACHINES = {"trn1.2xlarge": 2, "trn1.32xlarge": 32}  # NeuronCores
UTILISATIONS = (0.1, 0.2, 0.4)
# Bytes a parameter: weights, their copies in the activations' type, gradients, both moments of Adam.
_BYTES = {"32-true": (4, 0, 4, 8), "bf16-mixed": (4, 2, 4, 8), "bf16-true": (2, 0, 2, 4)}


@dataclass(frozen=True)
class Experiment:
    """What a plan needs of an experiment's file.

    Attributes:
        micro_batch: blocks that a core takes at once.
        step_blocks: blocks of an optimizer step, over all cores and accumulated batches.
        max_steps: optimizer steps.
    """

    name: str
    config: ModelConfig
    precision: str
    checkpoint_activations: bool
    block_length: int
    micro_batch: int
    step_blocks: int
    max_steps: int

    def __post_init__(self):
        if self.precision not in _BYTES:
            raise ValueError(f"{self.name}: no plan for precision {self.precision}: choose one of {', '.join(_BYTES)}")

    @classmethod
    def read(cls, path: str | Path) -> "Experiment":
        """Reads a file that `ssm-trn fit --config` takes, and the files that it names.

        Raises:
            FileNotFoundError: there is no such file, or none of those that it names.
            ValueError: it leaves out what a plan needs.
        """
        path = Path(path)
        content: Any = read_piece(Path(), str(path), "the command")
        try:
            parts = {name: read_piece(path.parent, content[name], path.name) for name in ("model", "data", "trainer")}
            model, data, trainer = parts["model"]["init_args"], parts["data"]["init_args"], parts["trainer"]
            batch_size, steps = _count(data, "batch_size"), _count(trainer, "max_steps")
            devices = _count(trainer, "devices", 1) if trainer.get("devices") not in ("auto", -1) else 1
            ranks = _count(trainer, "num_nodes", 1) * devices
            if batch_size % ranks:
                raise ValueError(
                    f"{path}: a batch of {batch_size} blocks does not divide among {ranks} devices: change "
                    "data.init_args.batch_size"
                )
            return cls(
                path.stem,
                ModelConfig.from_dict(read_piece(path.parent, model["config"], path.name)),
                str(trainer.get("precision") or "32-true"),
                bool(model.get("checkpoint_activations")),
                _count(data, "block_length"),
                batch_size // ranks,
                batch_size * _count(trainer, "accumulate_grad_batches", 1),
                steps,
            )
        except (KeyError, TypeError) as error:
            missing = error.args[0] if isinstance(error, KeyError) else "a part with options"
            raise ValueError(f"{path} lacks {missing}: name an experiment that `ssm-trn fit --config` takes") from error

    @property
    def step_tokens(self) -> int:
        return self.step_blocks * self.block_length

    @property
    def tokens(self) -> int:
        return self.max_steps * self.step_tokens

    @cached_property
    def operations_per_token(self) -> float:
        """Of a forward pass."""
        return self.config.flops_per_token(self.block_length)

    @property
    def operations(self) -> float:
        """Of the whole training: the backward pass takes twice what the forward pass does."""
        return 3 * self.operations_per_token * self.tokens

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes on one core, by what takes them, without any sharding."""
        weights, copies, gradients, adam = _BYTES[self.precision]
        parameters, dtype = self.config.parameter_count(), torch.bfloat16
        if self.precision == "32-true":
            dtype = torch.float32
        kept = activation_bytes(self.config, self.block_length, dtype, self.checkpoint_activations)
        # When the backward pass begins: float32 log-probabilities, their gradient, and that in the activations' type.
        logits = self.block_length * self.config.padded_vocab_size * (4 + 4 + dtype.itemsize)
        return {
            "weights": (weights + copies) * parameters,
            "gradients": gradients * parameters,
            "Adam": adam * parameters,
            "activations": self.micro_batch * kept,
            "logits": self.micro_batch * logits,
        }

    def accumulated(self, cores: int) -> int:
        """Batches that each core adds up before an optimizer step. A ValueError if the blocks do not divide so."""
        if self.step_blocks % (cores * self.micro_batch):
            raise ValueError(
                f"a step of {self.step_blocks} blocks does not divide into batches of {self.micro_batch} on "
                f"{cores} cores: choose another micro_batch or number of nodes"
            )
        return self.step_blocks // (cores * self.micro_batch)


def _count(part: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A number from 1 on under a name; a KeyError if there is none, and no default."""
    value = part.get(name) if default is not None else part[name]
    value = default if value is None and default is not None else value
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{name} is {value!r}; a plan needs a number from 1 on")
    return value


def activation_bytes(config: ModelConfig, block_length: int, dtype=torch.bfloat16, checkpointed: bool = False) -> int:
    """Bytes that the forward pass of one block keeps for its backward pass, up to the logits, which are not counted.

    They are the storages that autograd saves in the torch forms of the ops, parameters left out. Where activations
    are checkpointed, those of the hungriest layer, which is computed anew, come on top of what is kept.
    """
    kept = _saved_bytes(config, block_length, dtype, checkpointed)
    if checkpointed:
        layers = {repr(layer): layer for layer in config.layers}.values()
        kept += max(_saved_bytes(replace(config, layers=[layer]), block_length, dtype, False) for layer in layers)
    return kept


def _saved_bytes(config: ModelConfig, block_length: int, dtype: torch.dtype, checkpointed: bool) -> int:
    model = LanguageModel.without_memory(config).to(dtype)
    model.checkpoint_activations = checkpointed
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages = {}  # held, so that no other takes the address of one that was freed

    def keep(x):
        storage = x.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        x, _ = model.features(*_block(block_length))
    x.sum()  # the graph has lived until here
    return sum(storage.nbytes() for storage in storages.values())


def trace_step(config: ModelConfig, block_length: int, dtype=torch.bfloat16) -> LanguageModel:
    """The model, without memory, after a forward and a backward pass over one block: gradients have their shapes.

    What depends on values, or has no shape before it runs, fails here: it could not be compiled either.
    """
    model = LanguageModel.without_memory(config).to(dtype)
    tokens, _, _, reset = _block(block_length)
    logits, _ = model(tokens, reset=reset)
    F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    return model


def _block(length: int) -> tuple:
    """tokens [1, T], state, mask and reset [1, T] of one block, without memory."""
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    return tokens, None, None, tokens.bool()


def plan(
    experiment: str,
    machine: str | None = None,
    nodes: int = 1,
    micro_batch: int | None = None,
    utilisation: list[float] | None = None,
    price_per_hour: float | None = None,
) -> None:
    """Prints what a training needs on trn1: memory of a core, counted, and hours, modelled.

    Args:
        experiment: The file that `ssm-trn fit --config` takes.
        machine: trn1.2xlarge or trn1.32xlarge; both by default.
        nodes: Machines that train together.
        micro_batch: Blocks that a core takes at once; the experiment's by default.
        utilisation: Shares of the peak of 95 TFLOP/s a core to assume, such as [0.2]; 0.1, 0.2 and 0.4 by default.
        price_per_hour: What one machine costs an hour, in your currency; asks for `machine`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It leaves out what a plan needs, or a number or name is wrong.
    """
    if machine is not None and machine not in MACHINES:
        raise ValueError(f"unknown machine '{machine}': choose one of {', '.join(MACHINES)}")
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise ValueError(f"price_per_hour is {price_per_hour}; it must be at least 0")
    if price_per_hour is not None and machine is None:
        raise ValueError("a price is that of one kind of machine: name it with --machine")
    shares = UTILISATIONS if utilisation is None else utilisation
    if nodes < 1 or (micro_batch is not None and micro_batch < 1):
        raise ValueError(f"nodes is {nodes}, micro_batch {micro_batch}: both must be at least 1")
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"utilisation is {shares}: give shares of the peak, such as [0.2]")
    run = Experiment.read(experiment)
    if micro_batch is not None:
        run = replace(run, micro_batch=micro_batch)
    machines = [machine] if machine else list(MACHINES)
    cores = [nodes * MACHINES[name] for name in machines]
    print(f"{run.name}\n\n{sizes_table([run])}\n")
    print(f"Memory of a core in GiB, counted:\n\n{memory_table([run], cores)}\n")
    print(f"Hours, modelled:\n\n{hours_table([run], machines, nodes, shares, price_per_hour)}\n")
    for name, count in zip(machines, cores, strict=True):
        print(f"{nodes} {name}: --trainer.devices {MACHINES[name]} {_flags(run, count)}")


def sizes_table(runs: Sequence[Experiment]) -> str:
    """Parameters, tokens and operations of each run."""
    header = ["run", "parameters", "tokens", "steps", "tokens a step", "MFLOP a token", "FLOP of the training"]
    rows = []
    for run in runs:
        numbers = (run.config.parameter_count(), run.tokens, run.max_steps, run.step_tokens)
        rows.append([run.name, *(f"{number:,}" for number in numbers), f"{run.operations_per_token / 1e6:.1f}"])
        rows[-1].append(f"{run.operations:.2e}")
    return markdown_table(header, rows)


def memory_table(runs: Sequence[Experiment], cores: Sequence[int]) -> str:
    """GiB of a core; with ZeRO-1, each of so many cores holds its share of Adam's moments only."""
    parts = ["weights", "gradients", "Adam", "activations", "logits"]
    header = ["run", "blocks at once", *parts, "together", *(f"with ZeRO-1 on {count} cores" for count in cores)]
    rows = []
    for run in runs:
        needs = run.memory
        whole = sum(needs.values())
        sharded = [whole - needs["Adam"] * (count - 1) // count for count in cores]
        rows.append([run.name, str(run.micro_batch), *(f"{needs[part] / GIB:.2f}" for part in parts)])
        rows[-1] += [f"{total / GIB:.2f} ({total / CORE_MEMORY:.0%})" for total in (whole, *sharded)]
    return markdown_table(header, rows)


def hours_table(
    runs: Sequence[Experiment],
    machines: Sequence[str],
    nodes: int = 1,
    utilisations: Sequence[float] = UTILISATIONS,
    price_per_hour: float | None = None,
) -> str:
    """Hours of each run on each kind of machine, and what they cost where a price is given."""
    header = ["run", "machines", "batches a step", *(f"hours at {share:.0%} of the peak" for share in utilisations)]
    if price_per_hour is not None:
        header += [f"cost at {share:.0%}" for share in utilisations]
    rows = []
    for run in runs:
        for machine in machines:
            cores = nodes * MACHINES[machine]
            hours = [run.operations / (share * CORE_PEAK * cores) / 3600 for share in utilisations]
            rows.append([run.name, f"{nodes} {machine}", str(run.accumulated(cores)), *(f"{h:,.1f}" for h in hours)])
            if price_per_hour is not None:
                rows[-1] += [f"{hour * nodes * price_per_hour:,.0f}" for hour in hours]
    return markdown_table(header, rows)


def _flags(run: Experiment, cores: int) -> str:
    """The options of `ssm-trn fit` that keep the experiment's step on so many cores."""
    batches = f"--trainer.accumulate_grad_batches {run.accumulated(cores)}"
    return f"{batches} --data.init_args.batch_size {cores * run.micro_batch}"


def tables(runs: Sequence[Experiment]) -> str:
    """All of several runs, on one machine of each kind."""
    cores = list(MACHINES.values())
    return "\n\n".join((sizes_table(runs), memory_table(runs, cores), hours_table(runs, list(MACHINES))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the tables of several experiments between the markers of a page, or prints them."""
    parser = argparse.ArgumentParser(prog="python -m ssm_trn.plan")
    parser.add_argument("experiments", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="a Markdown file whose marked place takes the tables")
    options = parser.parse_args(arguments)
    runs = [Experiment.read(path) for path in sorted(options.experiments)]
    if options.into is None:
        print(tables(runs))
    else:
        write_whole(options.into, into_markers(options.into.read_text(), tables(runs)))


if __name__ == "__main__":
    main()
