"""A subset of a cross product in which every pair of values of two axes occurs."""

from itertools import combinations, product
from typing import Any


def pairwise(**axes: list) -> list[dict[str, Any]]:
    """Points of the cross product of `axes`, chosen one by one so that each adds most pairs; always the same ones."""
    names = list(axes)

    def pairs_of(point: tuple) -> set:
        return set(combinations(zip(names, point, strict=True), 2))

    candidates = {point: pairs_of(point) for point in product(*axes.values())}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        point = max(candidates, key=lambda candidate: len(candidates[candidate] & missing))
        missing -= candidates.pop(point)
        chosen.append(dict(zip(names, point, strict=True)))
    return chosen
