"""One table of weights for both ways: which tensors of another project make up which of ours.

Each of our tensors is one or several of theirs below each other, perhaps in another order of rows, in another shape, or
with a constant added. All of these have an inverse, so a table that loads also saves.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssm_trn.layers import widened

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """ours = (their tensors stacked along the first axis, as a tensor of our shape)[order] + offset.

    Attributes:
        ours: name of our tensor.
        theirs: names of theirs, one or several.
        rows: length of each of theirs along the first axis; may be left out for a single one.
        tail: their shape after the first axis, where it is not ours.
        order: int64 [rows of ours], which row of the stack each of our rows is.
        offset: added to theirs: 1 for norms that store their weight less 1.
        any_cut: theirs may be cut into parts at other rows than `rows` says (they are saved as it says).
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    tail: tuple[int, ...] | None = None
    order: Tensor | None = None
    offset: float = 0.0
    any_cut: bool = False

    def shapes(self, ours: torch.Size) -> list[tuple[int, ...]]:
        """The shapes of their tensors, from the shape of ours."""
        tail = tuple(ours[1:]) if self.tail is None else self.tail
        rows = (ours.numel() // max(1, torch.Size(tail).numel()),) if self.rows is None else self.rows
        return [(count, *tail) for count in rows]

    def fits(self, parts: list[Tensor], ours: torch.Size) -> bool:
        """Whether their tensors have the shapes that make up one of the shape of ours."""
        shapes, found = self.shapes(ours), [tuple(part.shape) for part in parts]
        if not self.any_cut:
            return found == shapes
        return {shape[1:] for shape in found} == {shapes[0][1:]} and sum(s[0] for s in found) == sum(self.rows or ())

    def join(self, parts: list[Tensor], ours: torch.Size) -> Tensor:
        """Our tensor, of the shape `ours`, from theirs."""
        whole = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(ours)
        whole = whole if self.order is None else whole[self.order]
        return widened(whole) + self.offset if self.offset else whole

    def split(self, whole: Tensor) -> Weights:
        """Their tensors from ours: the inverse of `join`."""
        shapes = self.shapes(whole.shape)
        whole = whole - self.offset if self.offset else whole
        whole = whole if self.order is None else whole[self.order.argsort()]
        parts = whole.reshape(-1, *shapes[0][1:]).split([shape[0] for shape in shapes])
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}


def entry(ours: str, *theirs: str, **how) -> Entry:
    """An Entry in the order of reading: ours, theirs, and how."""
    return Entry(ours, theirs, **how)


def prefixed(entries: Iterable[Entry], ours: str, theirs: str) -> list[Entry]:
    """The entries with a prefix before the names of either side."""
    return [replace(e, ours=ours + e.ours, theirs=tuple(theirs + name for name in e.theirs)) for e in entries]


def to_ours(theirs: Weights, entries: Iterable[Entry], shapes: Mapping[str, torch.Size], source: str) -> Weights:
    """Our tensors from theirs.

    Raises:
        ValueError: that lists what is missing, what is left over or what has another shape.
    """
    theirs, ours, missing, misshapen = dict(theirs), {}, [], []
    for e in entries:
        missing += [name for name in e.theirs if name not in theirs]
        parts = [theirs.pop(name) for name in e.theirs if name in theirs]
        if len(parts) < len(e.theirs):
            continue
        if not e.fits(parts, shapes[e.ours]):
            for name, part, shape in zip(e.theirs, parts, e.shapes(shapes[e.ours]), strict=True):
                if part.shape != shape:
                    misshapen.append(f"{name} {list(part.shape)} instead of {list(shape)}")
            continue
        ours[e.ours] = e.join(parts, shapes[e.ours])
    problems = {"missing": missing, "left over": list(theirs), "of another shape": misshapen}
    told = [f"{problem} are {_listed(names)}" for problem, names in problems.items() if names]
    if told:
        raise ValueError(f"the weights of {source} do not fit its config.json: {'; '.join(told)}")
    return ours


def to_theirs(ours: Weights, entries: Iterable[Entry]) -> Weights:
    """Their tensors from ours."""
    return {name: part for e in entries for name, part in e.split(ours[e.ours]).items()}


def _listed(names: list[str]) -> str:
    """All names, those that differ in numbers alone told once with their count."""
    counts: dict[str, int] = {}
    for name in names:
        name = re.sub(r"\.\d+(?=\.)", ".*", name)
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in counts.items())
