"""Who goes next, by exact orders of small queues."""

import pytest

from services.scheduler.core import PolicySettings, PriorityClass
from services.scheduler.core.policies import Policy, PolicyName, make_policy
from services.scheduler.core.policies.priority import AGED_TURN
from services.scheduler.core.request import Request
from services.scheduler.core.tenant_ledger import Account
from services.scheduler.core.waiting_queue import WaitingQueue
from tests.unit.scheduler.harness import NOW_MS, bare_request

VIP, NORMAL, BATCH = PriorityClass.VIP, PriorityClass.NORMAL, PriorityClass.BATCH
AGEING_MS = 1000


def policy_of(name: PolicyName) -> Policy:
    return make_policy(PolicySettings(name, AGEING_MS))


def order(policy: Policy, requests: list[Request], now_ms: int = NOW_MS, charge: int = 0) -> list[int]:
    """Choose all, charging each's account; return arrivals in the order in which they were chosen."""
    queue = WaitingQueue(policy)
    for request in requests:
        queue.push(request)
    arrivals = []
    while (request := queue.peek(now_ms)) is not None:
        queue.remove(request)
        policy.note_chosen(request, now_ms)
        request.account.num_charged_tokens += charge
        arrivals.append(request.arrival)
    return arrivals


def test_fcfs_knows_only_arrival() -> None:
    requests = [bare_request(2, priority=VIP), bare_request(1, priority=BATCH), bare_request(3, deadline_ms=NOW_MS + 1)]
    assert order(policy_of("fcfs"), requests) == [1, 2, 3]


def test_priority_serves_classes_in_order_and_arrivals_within_a_class() -> None:
    classes = [BATCH, NORMAL, VIP, BATCH, NORMAL, VIP]
    requests = [bare_request(arrival, priority=priority) for arrival, priority in enumerate(classes, 1)]
    assert order(policy_of("priority"), requests) == [3, 6, 2, 5, 1, 4]


def test_priority_gives_every_fourth_choice_to_the_aged_and_the_oldest_of_them_first() -> None:
    aged = [
        bare_request(1, NOW_MS - AGEING_MS - 2, priority=NORMAL),
        bare_request(2, NOW_MS - AGEING_MS - 1, priority=BATCH),
    ]
    vips = [bare_request(arrival, priority=VIP) for arrival in range(3, 12)]
    assert AGED_TURN == 4
    assert order(policy_of("priority"), [*vips, *aged]) == [3, 4, 5, 1, 6, 7, 8, 2, 9, 10, 11]


def test_priority_does_not_age_a_request_before_its_time() -> None:
    young = bare_request(1, NOW_MS - AGEING_MS, priority=BATCH)
    vips = [bare_request(arrival, priority=VIP) for arrival in range(2, 8)]
    assert order(policy_of("priority"), [*vips, young]) == [2, 3, 4, 5, 6, 7, 1]


def test_aged_request_that_was_denied_has_its_turn_again() -> None:
    policy = policy_of("priority")
    aged = bare_request(1, NOW_MS - AGEING_MS - 1, priority=BATCH)
    vips = [bare_request(arrival, priority=VIP) for arrival in range(2, 9)]
    assert order(policy, vips[:3]) == [2, 3, 4]
    policy.note_chosen(aged, NOW_MS)
    policy.note_denied(aged, NOW_MS)
    assert order(policy, [*vips[3:], aged]) == [1, 5, 6, 7, 8]


def test_fair_alternates_between_tenants_however_many_requests_each_has() -> None:
    one, other = Account("one"), Account("other")
    requests = [bare_request(arrival, account=one) for arrival in range(1, 5)]
    requests += [bare_request(arrival, account=other) for arrival in (5, 6)]
    assert order(policy_of("fair"), requests, charge=10) == [1, 5, 2, 6, 3, 4]


def test_fair_follows_the_weights() -> None:
    heavy, light = Account("heavy", weight=2), Account("light")
    requests = [bare_request(arrival, account=heavy) for arrival in range(1, 7)]
    requests += [bare_request(arrival, account=light) for arrival in range(7, 10)]
    assert order(policy_of("fair"), requests, charge=10) == [1, 7, 2, 3, 8, 4, 5, 9, 6]


def test_deadline_serves_the_earliest_first_and_patience_bounds_the_wait_of_the_others() -> None:
    requests = [
        bare_request(1),
        bare_request(2, deadline_ms=NOW_MS + 5000),
        bare_request(3, deadline_ms=NOW_MS + 300),
        bare_request(4, NOW_MS + AGEING_MS, deadline_ms=NOW_MS + AGEING_MS + 1),
    ]
    assert order(policy_of("deadline"), requests) == [3, 1, 2, 4]


def test_composed_puts_classes_first_then_shares_then_deadlines() -> None:
    one, other = Account("one"), Account("other")
    requests = [
        bare_request(1, account=one),
        bare_request(2, account=one, deadline_ms=NOW_MS + 1),
        bare_request(3, account=other),
        bare_request(4, account=other, priority=BATCH),
        bare_request(5, account=one, priority=VIP),
    ]
    assert order(policy_of("composed"), requests, charge=10) == [5, 3, 2, 1, 4]


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair", "deadline", "composed"])
def test_queue_passes_over_a_tenant_of_a_model_under_any_policy(name: PolicyName) -> None:
    queue = WaitingQueue(policy_of(name))
    one, other = Account("one"), Account("other")
    queue.push(bare_request(1, account=one, model="big"))
    queue.push(bare_request(2, account=other, model="big"))
    queue.push(bare_request(3, account=one, model="small"))

    def first_but(*passed_over: tuple[str, str]) -> int | None:
        request = queue.peek(NOW_MS, lambda model, tenant: (model, tenant) in passed_over)
        return None if request is None else request.arrival

    assert first_but() == 1
    assert first_but(("big", "one")) == 2
    assert first_but(("big", "one"), ("big", "other")) == 3
    assert first_but(("big", "one"), ("big", "other"), ("small", "one")) is None
    assert [request.arrival for request in queue] == [1, 2, 3]
    assert len(queue) == 3


@pytest.mark.parametrize(
    ("name", "has_tenants", "has_deadlines"),
    [
        ("fcfs", False, False),
        ("priority", False, False),
        ("fair", True, False),
        ("deadline", False, True),
        ("composed", True, True),
    ],
)
def test_policies_tell_what_they_know(name: PolicyName, has_tenants: bool, has_deadlines: bool) -> None:
    policy = policy_of(name)
    assert (policy.has_tenants, policy.has_deadlines) == (has_tenants, has_deadlines)
    assert policy.level_of(bare_request(1, priority=BATCH)) == (2 if name in ("priority", "composed") else 1)
