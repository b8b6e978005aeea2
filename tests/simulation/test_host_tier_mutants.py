"""Tests of the tests: each known-bad change to the host tier must be caught by the simulation within a few worlds."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from services.common.errors import EngineError
from services.kv_cache.core.block import Block
from services.kv_cache.core.host_tier import HostTier
from services.kv_cache.core.messages import BlockCopy, CopyDirection
from services.scheduler.core import KVReply
from services.scheduler.core.kv_broker import KVBroker
from services.scheduler.core.request import Request
from tests.simulation.simulation import Simulation

MAX_SEEDS = 200
Patch = Callable[[pytest.MonkeyPatch], None]


def forget_to_offload(patch: pytest.MonkeyPatch) -> None:
    """Content is said to have moved to the host, but nobody is told to move it."""
    take_copies = HostTier.take_copies

    def mutant(self: HostTier) -> tuple[BlockCopy, ...]:
        return tuple(copy for copy in take_copies(self) if copy.direction is CopyDirection.TO_DEVICE)

    patch.setattr(HostTier, "take_copies", mutant)


def restore_before_making_room(patch: pytest.MonkeyPatch) -> None:
    """Copies of one reply are told last first."""
    take_copies = HostTier.take_copies
    patch.setattr(HostTier, "take_copies", lambda self: take_copies(self)[::-1])


def hand_out_slots_that_are_being_restored(patch: pytest.MonkeyPatch) -> None:
    """A slot is blanked for what is evicted, though its content is to be brought back in the same breath."""
    withhold, restore = HostTier.withhold, HostTier.restore

    def mutant_restore(self: HostTier, slot: Block, block: Block) -> Block:
        withhold(self, [slot])
        return restore(self, slot, block)

    def mutant_withhold(self: HostTier, slots: Iterable[Block]) -> None:
        for _ in slots:
            pass

    patch.setattr(HostTier, "withhold", mutant_withhold)
    patch.setattr(HostTier, "restore", mutant_restore)


def drop_copies_when_nobody_was_admitted(patch: pytest.MonkeyPatch) -> None:
    """Copies are taken to concern only who was admitted, but refills evict too."""
    apply_reply = KVBroker.apply_reply

    def mutant(self: KVBroker, reply: KVReply) -> list[Request]:
        return apply_reply(self, reply if reply.admitted else replace(reply, block_copies=()))

    patch.setattr(KVBroker, "apply_reply", mutant)


def is_caught(seed: int) -> bool:
    try:
        Simulation(seed).run()
    except (AssertionError, EngineError, AttributeError):
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        forget_to_offload,
        restore_before_making_room,
        hand_out_slots_that_are_being_restored,
        drop_copies_when_nobody_was_admitted,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_simulation_catches_mutant_of_the_host_tier(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(is_caught(seed) for seed in range(MAX_SEEDS))


@pytest.mark.slow
def test_worlds_together_see_blocks_restored_after_preemptions() -> None:
    num_restored = num_preemptions = 0
    for seed in range(20):
        simulation = Simulation(seed)
        simulation.run()
        num_restored += sum(simulation.manager.usage(name).num_restored for name in simulation.site_by_worker)
        num_preemptions += simulation.scheduler.load().num_preemptions
    assert num_restored > 10
    assert num_preemptions > 3
