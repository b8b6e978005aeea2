"""Copies between the tiers, as the scheduler sees them: it passes them on, in time and in order."""

from dataclasses import replace

import pytest

from services.kv_cache.core import KVCacheManager
from services.scheduler.core import BlockCopy, CopyDirection
from services.scheduler.core.host_tier import HostTierFacts, HostTierUse, num_useful_host_blocks
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler
from tests.unit.scheduler.harness import LIMITS, WORKER_INFO, Harness

TO_HOST, TO_DEVICE = CopyDirection.TO_HOST, CopyDirection.TO_DEVICE
INFO = replace(WORKER_INFO, num_blocks=4, num_host_blocks=8)
PROMPT_A, PROMPT_B = tuple(range(9)), tuple(range(20, 29))


def make_harness() -> Harness:
    """A mesh whose one worker has three blocks of four slots, and room for eight on the host."""
    return Harness(LIMITS, INFO, max_num_batched_tokens=16)


def run_alone(harness: Harness, request_id: str, prompt: tuple[int, ...]) -> None:
    harness.add(request_id, prompt, 1)
    harness.run_to_rest()


def test_copies_are_in_the_plan_that_has_the_first_row_of_who_needs_the_blocks() -> None:
    harness = make_harness()
    run_alone(harness, "a", PROMPT_A)
    harness.add("b", PROMPT_B, 1)
    harness.talk()
    plan = harness.plan()
    assert [copy.direction for copy in plan.block_copies] == [TO_HOST, TO_HOST]
    assert len(plan.rows) == 1
    harness.apply(plan)
    harness.run_to_rest()
    harness.add("again", PROMPT_A, 1)
    harness.talk()
    plan = harness.plan()
    assert [copy.direction for copy in plan.block_copies] == [TO_HOST, TO_HOST, TO_DEVICE, TO_DEVICE]
    assert plan.new_requests[0].num_computed_tokens == 8
    restored = tuple(copy.block_id for copy in plan.block_copies if copy.direction is TO_DEVICE)
    assert plan.new_requests[0].block_ids[:2] == restored


def test_copies_are_carried_out_when_the_request_that_they_were_for_has_ended() -> None:
    harness = make_harness()
    run_alone(harness, "a", PROMPT_A)
    harness.add("b", PROMPT_B, 1)
    harness.talk()
    harness.scheduler.abort_request("b")
    assert harness.scheduler.can_schedule(INFO.name)
    assert not harness.scheduler.is_idle()
    plan = harness.plan()
    assert (len(plan.block_copies), plan.rows) == (2, ())
    harness.apply(plan)
    harness.run_to_rest()
    harness.events()
    assert harness.scheduler.is_idle()


def test_copies_of_a_lost_manager_are_dropped() -> None:
    harness = make_harness()
    run_alone(harness, "a", PROMPT_A)
    harness.add("b", PROMPT_B, 1)
    harness.talk()
    harness.scheduler.reset_kv()
    harness.manager = KVCacheManager(epoch=8)
    harness.talk()
    assert harness.plan().block_copies == ()


def test_block_copy_is_a_value() -> None:
    assert BlockCopy(TO_HOST, 1, 2) == BlockCopy(TO_HOST, 1, 2) != BlockCopy(TO_DEVICE, 1, 2)


@pytest.mark.parametrize(
    ("restore_us", "prefill_us", "use", "num_blocks"),
    [
        (159.0, 10.0, "auto", 8),
        (160.0, 10.0, "auto", 0),
        (0.0, 10.0, "auto", 0),  # not measured
        (500.0, 10.0, "always", 8),
        (1.0, 10.0, "never", 0),
    ],
)
def test_host_tier_is_used_where_restoring_is_faster_than_computing_again(
    restore_us: float, prefill_us: float, use: HostTierUse, num_blocks: int
) -> None:
    assert num_useful_host_blocks(HostTierFacts(8, restore_us, prefill_us), 16, use) == num_blocks


def test_copies_for_a_worker_that_was_lost_meanwhile_do_not_reach_its_successor() -> None:
    harness = make_harness()
    run_alone(harness, "a", PROMPT_A)
    harness.add("b", PROMPT_B, 1)
    message = harness.scheduler.take_kv_message()
    assert message is not None
    reply = harness.manager.apply_batch(message_to_kv_cache(message))
    assert reply.block_copies
    harness.scheduler.open_worker(replace(INFO, epoch=2))
    harness.scheduler.apply_kv_reply(reply_to_scheduler(reply))
    assert harness.scheduler.schedule(INFO.name) is None
    harness.run_to_rest()
    assert [event.finish is not None for event in harness.events()] == [True, True]
