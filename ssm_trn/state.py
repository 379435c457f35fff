"""States are nested tuples of tensors, batch first: one function walks them all."""

from collections.abc import Callable

from torch import Tensor

State = Tensor | tuple["State", ...]


def map_state(function: Callable[[Tensor], Tensor], state):
    """The state with `function` applied to each of its tensors, as in `map_state(lambda x: x[rows], state)`."""
    if isinstance(state, Tensor):
        return function(state)
    return tuple(map_state(function, part) for part in state)
