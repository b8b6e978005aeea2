"""Choices of a few cells out of a product that is too big to try: every two levels of two factors meet in one of them.

Most faults that need a combination need one of two things; those of a covering choice are found by it, whatever the
other factors were. Greedy, as AETG is (Cohen, Dalal, Fredman, Patton: The AETG System, IEEE Transactions on Software
Engineering 23(7), 1997), but without chance, so that a test's names stay what they are.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

Level = tuple[int, int]
"""A factor and one of its levels, both by their places."""


def pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cells of the product of ``factors``, of at least two, such that all pairs of levels occur. Pure."""
    if not all(factors):
        return []  # as the product has none
    levels = [[(place, index) for index in range(len(factor))] for place, factor in enumerate(factors)]
    missing = {frozenset(pair): None for one, other in combinations(levels, 2) for pair in product(one, other)}
    num_uses: Counter[Level] = Counter()
    cells = []
    while missing:
        cell = dict(next(iter(missing)))  # a pair that no cell has yet
        for place in sorted(set(range(len(factors))) - set(cell), key=lambda place: -len(factors[place])):
            cell[place] = max(
                range(len(factors[place])),
                key=lambda index, place=place: (
                    sum(frozenset({(place, index), chosen}) in missing for chosen in cell.items()),
                    -num_uses[place, index],
                ),
            )
        num_uses.update(cell.items())
        for pair in combinations(cell.items(), 2):
            missing.pop(frozenset(pair), None)
        cells.append(tuple(factor[cell[place]] for place, factor in enumerate(factors)))
    return cells
