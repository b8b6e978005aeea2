"""The covering choice that tests make of their cells."""

import itertools

import pytest

from tests.pairs import pairs

PRODUCTS = [(2, 2), (1, 3), (4, 3, 2, 3, 2), (5, 8, 3, 2), (3, 3, 3, 3, 3, 3, 3)]


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_every_two_levels_of_two_factors_meet_in_a_cell(sizes):
    factors = [[f"{place}{level}" for level in range(size)] for place, size in enumerate(sizes)]
    cells = pairs(*factors)
    assert all(level in factor for cell in cells for level, factor in zip(cell, factors, strict=True))
    for one, other in itertools.combinations(range(len(factors)), 2):
        found = {(cell[one], cell[other]) for cell in cells}
        assert found == set(itertools.product(factors[one], factors[other]))


@pytest.mark.parametrize(("sizes", "most"), [((4, 3, 2, 3, 2), 13), ((5, 8, 3, 2), 40), ((3,) * 7, 20)], ids=str)
def test_cells_are_few_and_the_same_every_time(sizes, most):
    factors = [range(size) for size in sizes]
    assert pairs(*factors) == pairs(*factors)
    assert len(set(pairs(*factors))) == len(pairs(*factors)) <= most


def test_a_factor_without_levels_leaves_no_cell():
    assert pairs([], [1, 2], [3, 4]) == []
