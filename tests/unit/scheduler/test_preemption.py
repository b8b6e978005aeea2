"""Who gives way to whom."""

from services.scheduler.core import PolicySettings, PriorityClass
from services.scheduler.core.policies import make_policy
from services.scheduler.core.preemption import choose_victim, find_displaceable
from services.scheduler.core.request import Request
from tests.unit.scheduler.harness import bare_request

VIP, NORMAL, BATCH = PriorityClass.VIP, PriorityClass.NORMAL, PriorityClass.BATCH
POLICY = make_policy(PolicySettings("composed"))
FCFS = make_policy(PolicySettings("fcfs"))


def running(
    arrival: int, priority: PriorityClass = NORMAL, num_computed_tokens: int = 0, num_preemptions: int = 0
) -> Request:
    request = bare_request(arrival, priority=priority)
    request.num_computed_tokens = num_computed_tokens
    request.num_preemptions = num_preemptions
    return request


def test_victim_is_of_the_lowest_class() -> None:
    batch = running(1, BATCH, num_computed_tokens=4000)
    assert choose_victim([running(2, VIP), batch, running(3)], POLICY) is batch


def test_victim_within_a_class_loses_fewest_tokens() -> None:
    cheap = running(2, num_computed_tokens=40)
    assert choose_victim([running(1), cheap, running(3, num_computed_tokens=900)], POLICY) is cheap


def test_victim_is_the_latest_among_those_that_lose_about_the_same() -> None:
    latest = running(3, num_computed_tokens=120)
    assert choose_victim([running(1), running(2, num_computed_tokens=70), latest], POLICY) is latest


def test_request_of_best_standing_is_spared_even_when_it_would_lose_least() -> None:
    late_vip, oldest = running(9, VIP), running(1, num_computed_tokens=900)
    assert choose_victim([late_vip, oldest], POLICY) is oldest
    assert choose_victim([late_vip, oldest], FCFS) is late_vip


def test_request_that_runs_alone_is_its_own_victim() -> None:
    alone = running(1)
    assert choose_victim([alone], POLICY) is alone


def test_vip_may_displace_batch_work_and_nothing_else() -> None:
    batch, late_batch = running(1, BATCH, 10), running(4, BATCH, 10)
    others = [running(2), running(3, VIP)]
    assert find_displaceable(running(5, VIP), [batch, late_batch, *others], POLICY) == [late_batch, batch]
    assert find_displaceable(running(5, NORMAL), [batch, *others], POLICY) == []
    assert find_displaceable(running(5, VIP), [batch, *others], FCFS) == []


def test_batch_work_that_gave_way_twice_is_displaced_no_more() -> None:
    assert find_displaceable(running(2, VIP), [running(1, BATCH, num_preemptions=2)], POLICY) == []
    assert find_displaceable(running(2, VIP), [running(1, BATCH, num_preemptions=1)], POLICY) != []
