"""Which implementation of an op runs: each op offers its forms by name, and this file chooses.

`reference` is the recurrence as a plain loop (the truth), `torch` the chunked matmul form (the default everywhere).
`nki` (Trainium) and `fla` (GPU) are the names of kernel libraries; no op has a form of theirs yet.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

BACKENDS = ("reference", "torch", "nki", "fla")
_chosen: str | None = None  # a plain global, which torch.compile can read


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op inside the block with the backend `name`: "reference", "torch", "nki" or "fla".

    Raises:
        ValueError: for a name that is none of these; and inside the block, when an op has no such form here.
    """
    global _chosen
    if name not in BACKENDS:
        raise ValueError(f"unknown backend '{name}': choose one of {', '.join(BACKENDS)}")
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def select(op: str, forms: Mapping[str, Callable]) -> Callable:
    """The form of `op` to run: the one asked for by `use_backend`, else `torch`."""
    name = _chosen or "torch"
    if name not in forms:
        raise ValueError(f"{op} has no '{name}' form on this machine: use one of {', '.join(forms)}")
    return forms[name]
