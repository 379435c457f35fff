"""What a checkpoint holds beside Lightning's own, so that a run goes on as if it had never stopped."""

import os
import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import distributed


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """The states of all generators that a step may draw from, of each process; numbers and tensors only."""
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_backend() != "xla"):
        return [states]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, states)
    return gathered


def restore_random_states(gathered: list[dict[str, Any]], rank: int, device: torch.device) -> None:
    """Sets the generators of this process; a process that the run did not have before keeps its own."""
    if rank >= len(gathered):
        return
    states = gathered[rank]
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "device" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)


def deciding_settings(module: Any) -> dict[str, Any]:
    """What decides the numbers of each step beside model and data, by its name in the configuration."""
    trainer = module.trainer
    names = ("learning_rate", "weight_decay", "warmup_steps", "final_learning_rate_ratio")
    settings = {f"model.init_args.{name}": getattr(module, name) for name in names}
    settings["model.init_args.betas"] = list(module.betas)
    for name in ("accumulate_grad_batches", "gradient_clip_val", "precision"):
        settings[f"trainer.{name}"] = getattr(trainer, name)
    settings["trainer.gradient_clip_algorithm"] = getattr(trainer.gradient_clip_algorithm, "value", "norm")
    if module.final_learning_rate_ratio != 1:  # else the learning rate does not depend on the end
        settings |= {"trainer.max_steps": trainer.max_steps, "trainer.max_epochs": trainer.max_epochs}
    return settings


def check_settings(saved: dict[str, Any], wanted: dict[str, Any], trainer: Trainer) -> None:
    """A ValueError if a run would go on in its own folder with other settings than it was begun with.

    A new run, with a folder of its own, may begin with the checkpoint of another one and do otherwise.
    """
    saver = trainer.checkpoint_callback
    folder = os.path.abspath(os.path.dirname(trainer.ckpt_path or ""))
    if saver is None or folder != os.path.abspath(saver.dirpath or ""):
        return
    for name in wanted:
        if saved.get(name, wanted[name]) != wanted[name]:
            raise ValueError(
                f"the run was begun with {name} {saved[name]}, and would go on with {wanted[name]}: leave it as it "
                "was, or begin a new run from the checkpoint with another --run_folder and "
                f"--ckpt_path {trainer.ckpt_path}"
            )
