"""Tests of the tests: each known-bad way to treat quotas must be caught by the simulation within a few worlds."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from services.common.errors import EngineError
from services.kv_cache.core.ledger import Ledger
from services.scheduler.core import DenialReason, Denied, KVReply
from services.scheduler.core.admission_turns import AdmissionTurns
from services.scheduler.core.kv_broker import KVBroker
from services.scheduler.core.lane import Lane
from services.scheduler.core.lane_holds import AdmissionHold, LaneHolds
from services.scheduler.core.request import Request
from tests.simulation.simulation import Simulation
from tests.simulation.world import World

MAX_SEEDS = 500
Patch = Callable[[pytest.MonkeyPatch], None]


def change_denials(patch: pytest.MonkeyPatch, change: Callable[[Denied], Denied]) -> None:
    apply_reply = KVBroker.apply_reply

    def mutant(self: KVBroker, reply: KVReply) -> list[Request]:
        return apply_reply(self, replace(reply, denied=tuple(map(change, reply.denied))))

    patch.setattr(KVBroker, "apply_reply", mutant)


def ignore_whom_to_preempt(patch: pytest.MonkeyPatch) -> None:
    """An owner that is denied waits like anybody else."""
    change_denials(patch, lambda denied: replace(denied, reclaim_handles=()))


def ignore_why_blocks_are_denied(patch: pytest.MonkeyPatch) -> None:
    """Every denial is taken for one of an exhausted pool."""
    change_denials(patch, lambda denied: replace(denied, reason=DenialReason.CAPACITY))


def hold_everybody_at_a_limit(patch: pytest.MonkeyPatch) -> None:
    """A tenant at its limit holds up all that wait behind it."""

    def mutant(self: LaneHolds, until: AdmissionHold, tenant: str) -> None:
        self.hold_all(until, tenant)

    patch.setattr(LaneHolds, "hold_tenant", mutant)


def let_owners_wait_behind_others(patch: pytest.MonkeyPatch) -> None:
    """While the pool is exhausted, nobody asks for what is reserved to its tenant."""
    patch.setattr(LaneHolds, "set_owners", lambda self, owners: self.lift())


def give_reclaimed_places_to_anybody(patch: pytest.MonkeyPatch) -> None:
    """Who gave way may have its place again before the one that it gave way to."""

    def mutant(self: AdmissionTurns) -> Iterator[tuple[Request, Lane]]:
        return iter(())

    patch.setattr(AdmissionTurns, "_choose_reclaimers", mutant)


def grant_beyond_the_limit(patch: pytest.MonkeyPatch) -> None:
    """The manager forgets limits."""
    judge = Ledger.judge

    def mutant(self: Ledger, account, num_charged: int, num_taken: int, num_available: int):  # type: ignore[no-untyped-def]
        limit, account.limit = account.limit, self._num_usable
        answer = judge(self, account, num_charged, num_taken, num_available)
        account.limit = limit
        return answer

    patch.setattr(Ledger, "judge", mutant)


def seeds_of_worlds_with_quotas() -> list[int]:
    return [seed for seed in range(MAX_SEEDS) if World.draw(random.Random(seed), seed).has_quotas]


def is_caught(seed: int) -> bool:
    try:
        Simulation(seed).run()
    except (AssertionError, EngineError):
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        ignore_whom_to_preempt,
        ignore_why_blocks_are_denied,
        hold_everybody_at_a_limit,
        let_owners_wait_behind_others,
        give_reclaimed_places_to_anybody,
        grant_beyond_the_limit,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_simulation_catches_mutant_of_quotas(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(is_caught(seed) for seed in seeds_of_worlds_with_quotas())


@pytest.mark.slow
def test_worlds_together_see_tenants_at_their_limits_and_reservations_reclaimed() -> None:
    num_limited = num_reclaimed = 0
    for seed in seeds_of_worlds_with_quotas()[:30]:
        simulation = Simulation(seed)
        simulation.run()
        num_limited += simulation.quotas.num_limited
        num_reclaimed += simulation.quotas.num_reclaimed
    assert num_limited > 10
    assert num_reclaimed > 3
