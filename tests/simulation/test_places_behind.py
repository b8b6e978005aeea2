"""Worlds in which tenants are behind and ahead by other numbers of places at each step, and no law may break.

In the other worlds hardly anybody is behind: requests are few and short, and a mean answer takes a while to be known.
"""

import random

import pytest

from services.scheduler.core.own_machine import MAX_LAG_RATIO, OwnMachine
from tests.simulation.simulation import Simulation


@pytest.mark.slow
def test_no_law_breaks_while_shares_of_places_jump_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    num_jumps = 0

    def jump(_: OwnMachine, share_of_places: float) -> int:
        nonlocal num_jumps
        num_places = rng.randint(0, int(MAX_LAG_RATIO * share_of_places))
        num_jumps += num_places > 0
        return num_places

    monkeypatch.setattr(OwnMachine, "num_places_behind", jump)
    for seed in range(200):
        Simulation(seed).run()
    assert num_jumps > 100
