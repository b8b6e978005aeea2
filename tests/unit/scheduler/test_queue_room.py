"""Who is let into the queue, and when a refused client is told to come back."""

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core import PriorityClass, SchedulerLimits
from services.scheduler.core.drain_meter import DrainMeter
from services.scheduler.core.queue_room import QueueRoom
from services.scheduler.core.request import Request
from tests.unit.scheduler.harness import NOW_MS, bare_request


def room_of(max_requests: int, max_tokens: int = 10**6, *, has_tenants: bool = False) -> QueueRoom:
    limits = SchedulerLimits(max_waiting_requests=max_requests, max_waiting_tokens=max_tokens)
    return QueueRoom(limits, has_tenants=has_tenants)


def fill(room: QueueRoom, number: int, **changes: object) -> list[Request]:
    """Let in as many as have room, at most ``number``."""
    entered = []
    for arrival in range(number):
        request = bare_request(arrival, **changes)  # type: ignore[arg-type]
        try:
            room.check(request, NOW_MS)
        except EngineError:
            break
        room.enter(request)
        entered.append(request)
    return entered


def refusal(room: QueueRoom, now_ms: int = NOW_MS, **changes: object) -> EngineError:
    with pytest.raises(EngineError) as error:
        room.check(bare_request(99, **changes), now_ms)  # type: ignore[arg-type]
    assert error.value.reason is ErrorReason.QUEUE_FULL
    return error.value


def test_flood_of_one_class_leaves_the_others_their_room() -> None:
    room = room_of(3)
    assert len(fill(room, 9, priority=PriorityClass.BATCH)) == 3
    refusal(room, priority=PriorityClass.BATCH)
    assert len(fill(room, 9, priority=PriorityClass.VIP)) == 3


def test_tokens_are_bounded_per_class_unless_the_request_waits_alone() -> None:
    room = room_of(100, max_tokens=10)
    assert len(fill(room, 1, prompt=(1,) * 11)) == 1
    refusal(room, prompt=(1,))
    assert len(fill(room, 5, prompt=(1,) * 4, priority=PriorityClass.VIP)) == 2


def test_tenant_alone_gets_four_fifths_and_the_next_one_four_fifths_of_the_rest() -> None:
    room = room_of(100, has_tenants=True)
    assert len(fill(room, 200, tenant="flood")) == 80
    assert len(fill(room, 200, tenant="second")) == 16
    assert len(fill(room, 200, tenant="third")) == 4
    assert refusal(room, tenant="flood").metadata["num_waiting_of_tenant"] == "80"


def test_tenant_may_fill_the_queue_under_a_policy_without_tenants() -> None:
    assert len(fill(room_of(100), 200, tenant="flood")) == 100


def test_room_is_given_back_by_those_that_leave() -> None:
    room = room_of(2)
    first, _ = fill(room, 2)
    room.leave(first)
    assert (room.num_requests, room.num_tokens) == (1, 3)
    assert len(fill(room, 2)) == 1


def test_retry_hint_is_the_time_in_which_the_queue_drained_so_far() -> None:
    room = room_of(2)
    requests = fill(room, 2)
    for second in range(60):  # one request in five seconds
        if second % 5 == 0:
            room.note_started(requests[0], NOW_MS + second * 1000)
    assert refusal(room, NOW_MS + 60_000).metadata["retry_after_s"] in ("5", "6", "7")


def test_retry_hint_is_a_minute_when_nothing_drains_and_a_second_when_all_does() -> None:
    room = room_of(2)
    requests = fill(room, 2)
    assert refusal(room).metadata["retry_after_s"] == "60"
    for _ in range(100):
        room.note_started(requests[0], NOW_MS)
    assert refusal(room).metadata["retry_after_s"] == "1"


def test_meter_measures_a_steady_rate_from_its_first_seconds_on() -> None:
    meter = DrainMeter()
    for step in range(40):
        meter.note(num_tokens=500, now_ms=NOW_MS + step * 100)
    assert meter.retry_after_s(num_requests=100, num_tokens=0, now_ms=NOW_MS + 4000) in (10, 11)
    assert meter.retry_after_s(num_requests=0, num_tokens=100_000, now_ms=NOW_MS + 4000) in (20, 21, 22)
