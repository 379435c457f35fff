"""Which parameters the optimizer decays towards zero."""

from typing import Any

from torch import nn

# Decay rates, skip weights and step-size biases of the recurrences, whatever their shape: pulled to zero they would
# change the memory of the model, not its size.
_NEVER_DECAYED = ("A_log", "A_imag", "D", "dt_bias", "bias")


def parameter_groups(model: nn.Module, weight_decay: float, decay_embeddings: bool = False) -> list[dict[str, Any]]:
    """Two groups for a PyTorch optimizer: what is decayed, and what is not.

    Not decayed are one-dimensional parameters (norms and biases among them), `A_log`, `A_imag`, `D` and `dt_bias`
    of any shape, the own parameters of every module with an attribute `no_weight_decay = True` (an attribute of a
    parameter would be lost when the model moves to another device), and embeddings (a head tied to one included) unless
    `decay_embeddings` says otherwise. Frozen parameters are in neither group.

    The parameters come with their names, which the optimizer keeps as `param_names` and saves with its state.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    spared = {
        id(parameter)
        for module in model.modules()
        if getattr(module, "no_weight_decay", False)
        for parameter in module.parameters(recurse=False)
    }
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        keep = (
            parameter.ndim < 2
            or name.rpartition(".")[2] in _NEVER_DECAYED
            or id(parameter) in spared
            or (id(parameter) in embeddings and not decay_embeddings)
        )
        (kept if keep else decayed).append((name, parameter))
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
