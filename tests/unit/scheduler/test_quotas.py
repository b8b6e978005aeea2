"""What the scheduler makes of quotas: who is refused, who waits for whom, who gives way, and what is told of it."""

from dataclasses import replace
from typing import Any

from services.common.errors import ErrorReason
from services.kv_cache.core import QuotaRule, Quotas
from services.scheduler.core import FinishReason, KVMessage, PolicySettings, PriorityClass
from services.scheduler.core.lane_holds import AdmissionHold, AskTerms, LaneHolds
from services.scheduler.core.timeline_events import Blocked, BlockedCause, Peer, Preempted, PreemptionCause
from tests.unit.scheduler.harness import LIMITS, WORKER, WORKER_INFO, Harness

NORMAL, BATCH, VIP = PriorityClass.NORMAL, PriorityClass.BATCH, PriorityClass.VIP
FCFS = PolicySettings("fcfs")


def make_harness(*rules: QuotaRule, policy: PolicySettings = FCFS, **changes: Any) -> Harness:
    """One worker with 8 usable blocks of 4 slots."""
    harness = Harness(LIMITS, replace(WORKER_INFO, max_model_len=40), policy=policy, **changes)
    harness.manager.set_quotas(Quotas(rules))
    harness.talk()
    return harness


def add(harness: Harness, request_id: str, tenant: str, num_blocks: int, max_tokens: int = 1, **changes: Any) -> None:
    """Add a request whose prompt, with the credit, takes ``num_blocks``; nobody shares its content."""
    prompt = tuple(range(4 * num_blocks - (2 if max_tokens > 1 else 0)))
    harness.add(request_id, prompt, max_tokens=max_tokens, tenant=tenant, cache_scope=request_id, **changes)


def asked(message: KVMessage | None) -> list[tuple[str, bool]]:
    assert message is not None
    return [(admit.request_id, admit.is_reserved_only) for admit in message.admits]


def running(harness: Harness) -> set[str]:
    return {request.request_id for request in harness.scheduler._lane_by_worker[WORKER].running.values()}


def events_of(harness: Harness, request_id: str, kind: type[Blocked] | type[Preempted]) -> list[Any]:
    (timeline,) = harness.scheduler.explain(request_id)
    return [event for event in timeline.events if isinstance(event, kind)]


def test_request_that_its_tenant_may_never_hold_is_refused_before_it_runs() -> None:
    harness = make_harness(QuotaRule("*", "a", limit_ratio=0.5))
    add(harness, "small", "a", 4)
    add(harness, "large", "a", 3, max_tokens=8)
    harness.talk()
    assert running(harness) == {"small"}
    (event,) = harness.events()
    assert (event.request_id, event.token_ids) == ("large", ())
    assert event.finish is not None
    assert event.finish.error is not None
    assert event.finish.error.reason is ErrorReason.EXCEEDS_KV_CAPACITY
    assert event.finish.error.metadata == {"field": "max_tokens", "num_slots_needed": "17", "tenant": "a"}
    harness.run_to_rest()
    assert harness.outputs() == {"small": [50]}
    assert harness.scheduler.is_idle()


def test_output_without_a_limit_of_the_client_is_cut_at_what_its_tenant_may_hold() -> None:
    harness = make_harness(QuotaRule("*", "a", limit_ratio=0.5))
    add(harness, "a1", "a", 3, max_tokens=20, is_max_tokens_implied=True)
    harness.run_to_rest()
    (event,) = harness.events()
    assert event.finish is not None
    assert (event.finish.reason, len(event.token_ids)) == (FinishReason.LENGTH, 4 * 4 + 1 - 10)


def test_prompt_beyond_what_its_tenant_may_hold_is_refused_though_the_client_named_no_limit() -> None:
    harness = make_harness(QuotaRule("*", "a", limit_ratio=0.5))
    add(harness, "a1", "a", 5, is_max_tokens_implied=True)
    harness.run_to_rest()
    (event,) = harness.events()
    assert event.finish is not None
    assert event.finish.error is not None
    assert event.finish.error.reason is ErrorReason.EXCEEDS_KV_CAPACITY


def test_running_request_ends_when_it_outgrows_a_limit_that_was_lowered() -> None:
    harness = make_harness()
    add(harness, "a1", "a", 3, max_tokens=10)
    harness.step()
    harness.manager.set_quotas(Quotas((QuotaRule("*", "a", limit_ratio=0.4),)))
    harness.run_to_rest()
    events = harness.events()
    assert sum(len(event.token_ids) for event in events) > 0
    (finish,) = [event.finish for event in events if event.finish is not None]
    assert finish.reason is FinishReason.ERROR
    assert finish.error is not None
    assert finish.error.reason is ErrorReason.EXCEEDS_KV_CAPACITY


def test_request_that_is_too_large_for_its_tenant_on_one_worker_runs_on_a_larger_one() -> None:
    harness = Harness(LIMITS, replace(WORKER_INFO, name="small", num_blocks=6), WORKER_INFO, policy=FCFS)
    harness.manager.set_quotas(Quotas((QuotaRule("*", "a", limit_ratio=0.5),)))
    add(harness, "a1", "a", 4)
    pools = []
    while not running(harness):
        message = harness.talk()
        assert message is not None
        pools += [admit.pool for admit in message.admits]
    assert pools == ["small", WORKER]


def test_tenant_at_its_limit_holds_back_nobody_else_and_asks_again_when_its_own_request_has_ended() -> None:
    harness = make_harness(QuotaRule("*", "a", limit_ratio=0.5))
    add(harness, "a1", "a", 3)
    add(harness, "a2", "a", 2)
    add(harness, "b1", "b", 2)
    assert asked(harness.talk()) == [("a1", False), ("a2", False), ("b1", False)]
    assert running(harness) == {"a1", "b1"}
    add(harness, "b2", "b", 2)
    assert asked(harness.talk()) == [("b2", False)]
    assert running(harness) == {"a1", "b1", "b2"}
    (blocked,) = events_of(harness, "a2", Blocked)
    assert (blocked.cause, blocked.num_blocks_needed, blocked.num_blocks_free) == (BlockedCause.TENANT_LIMIT, 2, 1)
    harness.scheduler.abort_request("b1")
    assert asked(harness.talk()) == []
    harness.scheduler.abort_request("a1")
    assert asked(harness.talk()) == [("a2", False)]
    assert running(harness) == {"a2", "b2"}


def test_tenant_at_its_limit_asks_again_when_quotas_have_changed() -> None:
    harness = make_harness(QuotaRule("*", "a", limit_ratio=0.5))
    add(harness, "a1", "a", 3)
    add(harness, "a2", "a", 2)
    harness.talk()
    harness.manager.set_quotas(Quotas())
    add(harness, "b1", "b", 1)
    assert asked(harness.talk()) == [("b1", False)]
    assert asked(harness.talk()) == [("a2", False)]
    assert running(harness) == {"a1", "a2", "b1"}


def test_running_request_at_its_tenants_limit_costs_one_of_its_own_tenant() -> None:
    harness = make_harness(QuotaRule("*", "a", limit_ratio=0.5))
    add(harness, "b1", "b", 2, max_tokens=8)
    add(harness, "a1", "a", 2, max_tokens=8)
    add(harness, "a2", "a", 2, max_tokens=8)
    harness.run_to_rest()
    assert {request_id: len(tokens) for request_id, tokens in harness.outputs().items()} == {"a1": 8, "a2": 8, "b1": 8}
    assert events_of(harness, "b1", Preempted) == events_of(harness, "a1", Preempted) == []
    (preempted,) = events_of(harness, "a2", Preempted)
    assert (preempted.cause, preempted.by) == (PreemptionCause.TENANT_LIMIT, Peer("a1", "a", NORMAL))


def test_vip_at_its_tenants_limit_takes_the_blocks_of_its_own_tenants_batch_work_only() -> None:
    rules = (QuotaRule("*", "a", limit_ratio=0.5),)
    harness = make_harness(*rules, policy=PolicySettings("priority"))
    add(harness, "b1", "b", 4, priority=BATCH)
    add(harness, "a1", "a", 4, priority=BATCH)
    harness.talk()
    add(harness, "a2", "a", 4, priority=VIP)
    harness.talk()
    harness.talk()
    assert running(harness) == {"b1", "a2"}
    (preempted,) = events_of(harness, "a1", Preempted)
    assert (preempted.cause, preempted.by) == (PreemptionCause.BLOCKS_TAKEN, Peer("a2", "a", VIP))


def test_owner_gets_its_reservation_back_from_whom_the_manager_names() -> None:
    harness = make_harness(QuotaRule("*", "a", reserved_ratio=0.5))
    for request_id, num_blocks in (("b1", 4), ("b2", 2), ("b3", 2)):
        add(harness, request_id, "b", num_blocks)
    harness.talk()
    add(harness, "a1", "a", 3)
    harness.talk()
    assert running(harness) == {"b1"}  # the latest went first, and as many as were needed
    for request_id in ("b2", "b3"):
        (preempted,) = events_of(harness, request_id, Preempted)
        assert (preempted.cause, preempted.by) == (PreemptionCause.BURST_RECLAIMED, Peer("a1", "a", NORMAL))
    assert asked(harness.talk())[0] == ("a1", False)
    assert running(harness) == {"b1", "a1"}
    harness.run_to_rest()
    assert {request_id: len(tokens) for request_id, tokens in harness.outputs().items()} == dict.fromkeys(
        ("a1", "b1", "b2", "b3"), 1
    )


def test_owner_asks_for_what_it_is_owed_although_others_were_denied() -> None:
    harness = make_harness(QuotaRule("*", "a", reserved_ratio=0.5))
    add(harness, "b1", "b", 6)
    add(harness, "b2", "b", 4)
    harness.talk()
    add(harness, "b3", "b", 1)
    assert harness.talk() is None  # held back, so that b2 is not overtaken for ever
    add(harness, "a1", "a", 2)
    assert asked(harness.talk()) == [("a1", True)]
    assert running(harness) == {"b1", "a1"}
    add(harness, "a2", "a", 3)
    assert asked(harness.talk()) == [("a2", True)]
    assert running(harness) == {"b1", "a1"}  # that would be more than is reserved
    add(harness, "a3", "a", 1)
    assert harness.talk() is None


def test_place_of_who_gave_way_goes_to_the_owner_though_others_are_first_in_the_queue() -> None:
    harness = make_harness(QuotaRule("*", "a", reserved_ratio=0.5), max_num_requests=2)
    add(harness, "b1", "b", 8)
    add(harness, "b2", "b", 8)
    harness.talk()
    add(harness, "b3", "b", 8)
    add(harness, "a1", "a", 4)
    assert asked(harness.talk()) == [("a1", True)]
    assert running(harness) == set()
    assert asked(harness.talk())[0] == ("a1", False)
    assert running(harness) == {"a1"}


def test_owner_whose_victims_gave_way_already_goes_before_all_others_too() -> None:
    harness = make_harness(QuotaRule("*", "a", reserved_ratio=0.5), policy=PolicySettings("priority"))
    add(harness, "b1", "b", 8)
    harness.talk()
    for request_id in ("b2", "b3"):
        add(harness, request_id, "b", 2, priority=VIP)
    harness.talk()
    for request_id in ("a1", "a2"):
        add(harness, request_id, "a", 2)
    assert asked(harness.talk()) == [("a1", True), ("a2", True)]
    assert asked(harness.talk())[:2] == [("a1", False), ("a2", False)]
    assert {"a1", "a2"} < running(harness)


def test_vip_displaces_for_blocks_nobody_whose_tenant_has_a_reservation() -> None:
    harness = make_harness(QuotaRule("*", "a", reserved_ratio=0.5), policy=PolicySettings("priority"))
    add(harness, "a1", "a", 4, priority=BATCH)
    add(harness, "b1", "b", 3, priority=BATCH)
    harness.talk()
    add(harness, "c1", "c", 4, priority=VIP)
    harness.talk()
    harness.talk()
    assert running(harness) == {"a1", "c1"}


def test_holds_bind_everybody_but_owners_that_were_not_denied() -> None:
    holds = LaneHolds()
    holds.set_owners(("a", "b"))
    holds.hold_all(AdmissionHold.UNTIL_NEWS, "b")
    assert [holds.terms_for(tenant) for tenant in "abc"] == [AskTerms.RESERVED_ONLY, AskTerms.HELD, AskTerms.HELD]
    assert holds.askable_owners() == {"a"}
    holds.note_shared("c")
    assert [holds.terms_for(tenant) for tenant in "abc"] == [AskTerms.FREE] * 3


def test_hold_after_a_preemption_outlasts_a_committed_prompt() -> None:
    holds = LaneHolds()
    holds.hold_all(AdmissionHold.UNTIL_FINISH, "a")
    holds.hold_all(AdmissionHold.UNTIL_NEWS, "b")
    holds.note_shared("a")
    assert holds.terms_for("a") is AskTerms.HELD
    holds.note_finished("b", running_tenants=("a",))
    assert holds.terms_for("a") is AskTerms.FREE


def test_hold_at_a_limit_ends_with_a_request_of_the_tenant_or_any_when_it_runs_none() -> None:
    holds = LaneHolds()
    holds.hold_tenant(AdmissionHold.UNTIL_FINISH, "a")
    holds.note_shared("a")
    holds.note_finished("b", running_tenants=("a", "b"))
    assert (holds.terms_for("a"), holds.terms_for("b")) == (AskTerms.HELD, AskTerms.FREE)
    holds.note_finished("b", running_tenants=("b",))
    assert holds.terms_for("a") is AskTerms.FREE
