"""Classes, tenants and places, by exact conversations with the KV-cache manager."""

from dataclasses import replace

from services.common.errors import EngineError
from services.scheduler.core import KVMessage, PolicySettings, PriorityClass
from services.scheduler.core.tenant_ledger import CONTENTION_MS
from tests.unit.scheduler.harness import LIMITS, NOW_MS, WORKER_INFO, Harness

VIP, BATCH = PriorityClass.VIP, PriorityClass.BATCH
H1, H2, H3 = 101, 102, 103


def asked(message: KVMessage | None) -> list[str]:
    return [] if message is None else [admit.request_id for admit in message.admits]


def test_waiting_vip_takes_the_place_of_running_batch_work() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("batch", priority=BATCH)
    harness.step()
    harness.add("vip", priority=VIP)
    message = harness.talk()
    assert message is not None
    assert message.releases == (H1,)
    assert asked(message) == ["vip"]
    plan = harness.plan()
    assert plan.finished_handles == (H1,)
    assert [row.handle for row in plan.rows] == [H2]
    harness.apply(plan)
    harness.run_to_rest()
    assert {request_id: len(tokens) for request_id, tokens in harness.outputs().items()} == {"batch": 4, "vip": 4}


def test_waiting_vip_takes_no_place_from_a_normal_request() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("normal")
    harness.step()
    harness.add("vip", priority=VIP)
    assert asked(harness.talk()) == []


def test_batch_work_is_displaced_twice_and_then_runs_to_its_end() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("batch", (1, 2, 3), 8, priority=BATCH)
    orders = []
    for index in range(3):
        harness.step()
        harness.add(f"vip-{index}", max_tokens=1, priority=VIP)
        orders += asked(harness.talk())
        harness.apply(harness.plan())
    assert orders == ["vip-0", "vip-1"]
    assert harness.scheduler.load().num_preemptions == 2
    harness.run_to_rest()
    assert len(harness.outputs()["batch"]) == 8


def test_vip_that_finds_no_blocks_gets_those_of_batch_work() -> None:
    harness = Harness(LIMITS, replace(WORKER_INFO, num_blocks=5, max_model_len=16))  # 16 slots
    harness.add("normal", (3,) * 3, 5)
    harness.add("batch", (1,) * 5, 4, priority=BATCH)
    harness.step()
    harness.add("vip", (2,) * 8, 1, priority=VIP)
    assert asked(harness.talk()) == ["vip"]
    message = harness.talk()
    assert message is not None
    assert (message.releases, asked(message)) == ((H2,), ["vip", "batch"])
    assert harness.scheduler.load().num_running == 2
    harness.run_to_rest()
    assert {key: len(tokens) for key, tokens in harness.outputs().items()} == {"normal": 5, "batch": 4, "vip": 1}


def test_vip_that_could_not_run_even_so_displaces_nobody() -> None:
    harness = Harness(LIMITS, replace(WORKER_INFO, num_blocks=5, max_model_len=16))
    harness.add("normal", (3,) * 8, 5)
    harness.add("batch", (1,) * 3, 2, priority=BATCH)
    harness.step()
    harness.add("vip", (2,) * 12, 1, priority=VIP)
    harness.talk()
    assert harness.scheduler.load().num_running == 2
    harness.run_to_rest()
    assert set(harness.outputs()) == {"normal", "batch", "vip"}


def test_tenant_that_has_had_more_tokens_waits_for_the_other() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("running", (1, 2, 3), 8, tenant="greedy")
    harness.step()
    for index in range(3):
        harness.add(f"greedy-{index}", tenant="greedy")
    harness.add("modest-0", tenant="modest")
    harness.add("modest-1", tenant="modest")
    order = []
    while not harness.scheduler.is_idle():
        order += asked(harness.talk())
        plan = harness.scheduler.schedule("worker-0")
        if plan is not None:
            harness.apply(plan)
        harness.events()
    # Modest was lifted to the 4 tokens that greedy had had when it came; greedy has had 11 when a place comes free.
    assert order == ["modest-0", "greedy-0", "modest-1", "greedy-1", "greedy-2"]


def test_weights_of_tenants_are_the_shares_of_what_they_get() -> None:
    policy = PolicySettings("fair", tenant_weights=(("heavy", 3.0),))
    harness = Harness(LIMITS, policy=policy, max_num_requests=1)
    for index in range(12):
        for tenant in ("light", "heavy"):
            harness.add(f"{tenant}-{index}", tenant=tenant)
    order: list[str] = []
    while len(order) < 12:
        order += [request_id.partition("-")[0] for request_id in asked(harness.talk())]
        plan = harness.scheduler.schedule("worker-0")
        if plan is not None:
            harness.apply(plan)
    assert (order.count("heavy"), order.count("light")) == (9, 3)


def test_cancelled_admission_is_not_charged() -> None:
    harness = Harness()
    harness.add("a")
    message = harness.scheduler.take_kv_message()
    assert message is not None
    account = harness.scheduler._book.request_by_id["a"].account
    assert account.counter == 3
    harness.scheduler.abort_request("a")
    assert account.counter == 0


def test_prompt_is_charged_less_its_prefix_hit_and_outputs_one_by_one() -> None:
    harness = Harness()
    harness.add("a", tuple(range(10)), 2)
    harness.run_to_rest()
    harness.add("b", tuple(range(10)), 2)
    account = harness.scheduler._book.request_by_id["b"].account
    assert account.counter == 12
    harness.run_to_rest()
    assert account.counter == 12 + (10 - 8) + 2


def test_flood_of_one_tenant_does_not_get_another_refused() -> None:
    harness = Harness(max_waiting_requests=10)
    refused = 0
    for index in range(20):
        try:
            harness.add(f"flood-{index}", tenant="flood")
        except EngineError:
            refused += 1
    assert refused == 12
    harness.add("modest", tenant="modest", now_ms=NOW_MS)


def running_after_talk(harness: Harness) -> int:
    harness.talk()
    return harness.scheduler.load().num_running


def test_tenant_that_has_its_share_leaves_a_place_free_while_another_one_contends() -> None:
    harness = Harness(max_num_requests=8, max_num_batched_tokens=64)
    harness.add("early", (1,), 1, tenant="modest")
    harness.run_to_rest()
    for index in range(9):
        harness.add(f"flood-{index}", (index,), tenant="flood")
    assert running_after_talk(harness) == 7
    harness.add("late", (1,), tenant="modest")
    assert asked(harness.talk()) == ["late"]


def test_all_places_are_used_when_nobody_contended_of_late() -> None:
    harness = Harness(max_num_requests=8, max_num_batched_tokens=64)
    harness.add("early", (1,), 1, tenant="modest")
    harness.run_to_rest()
    for index in range(9):
        harness.add(f"flood-{index}", (index,), tenant="flood", now_ms=NOW_MS + CONTENTION_MS + 1)
    assert running_after_talk(harness) == 8


def test_all_places_are_used_under_a_policy_without_tenants() -> None:
    harness = Harness(policy=PolicySettings("priority"), max_num_requests=8, max_num_batched_tokens=64)
    for index in range(9):
        harness.add(f"request-{index}", (index,), tenant=f"tenant-{index % 2}")
    assert running_after_talk(harness) == 8


def test_lower_class_does_not_go_before_one_that_leaves_a_place_free() -> None:
    harness = Harness(max_num_requests=8, max_num_batched_tokens=64)
    for index in range(9):
        harness.add(f"flood-{index}", (index,), tenant="flood")
    harness.add("batch", (1,), tenant="modest", priority=BATCH)
    assert running_after_talk(harness) == 7
    harness.add("normal", (1,), tenant="modest")
    assert asked(harness.talk()) == ["normal"]


def test_lower_class_does_not_go_before_a_higher_one_that_is_held_with_an_aged_one_of_its_tenant() -> None:
    harness = Harness(policy=PolicySettings("composed", ageing_ms=100), max_num_requests=8, max_num_batched_tokens=64)
    harness.add("early", (1,), 1, tenant="modest")
    harness.run_to_rest()
    harness.add("old", (1,), tenant="flood", priority=BATCH)
    for index in range(8):
        harness.add(f"flood-{index}", (index,), tenant="flood")
    assert running_after_talk(harness) == 7
    harness.add("batch", (1,), tenant="modest", priority=BATCH, now_ms=NOW_MS + 101)
    assert asked(harness.talk()) == []  # "old" is aged, and it is the turn of the aged


def test_tenant_takes_places_within_its_share_back_from_the_latest_of_one_that_borrowed_them() -> None:
    harness = Harness(max_num_requests=2, policy=PolicySettings("fair"))
    harness.add("early", tenant="heavy")
    harness.add("late", tenant="heavy")
    harness.step()
    harness.add("mine", tenant="light")
    message = harness.talk()
    assert message is not None
    assert message.releases == (H2,)
    assert asked(message) == ["mine"]
    harness.add("beyond my share", tenant="light")
    assert asked(harness.talk()) == []
    harness.run_to_rest()
    assert {request_id: len(tokens) for request_id, tokens in harness.outputs().items()} == {
        "early": 4,
        "late": 4,
        "mine": 4,
        "beyond my share": 4,
    }
    assert harness.scheduler.load().num_preemptions == 1


def flooded_harness() -> Harness:
    """All four places are the flood's, and one more of its requests waits."""
    info = replace(WORKER_INFO, num_blocks=33)
    harness = Harness(LIMITS, info, max_num_requests=4, policy=PolicySettings("fair"))
    for index in range(5):
        harness.add(f"flood-{index}", (index,), tenant="flood")
    harness.step()
    assert harness.scheduler.load().num_running == 4
    return harness


def test_tenant_takes_its_places_back_while_who_borrowed_them_is_the_next_to_go() -> None:
    harness = flooded_harness()
    harness.add("first", tenant="modest")  # stands where the flood does, and is later
    assert asked(harness.talk()) == ["first"]
    harness.add("second", tenant="modest")  # stands behind the flood, by a prompt
    assert asked(harness.talk()) == ["second"]
    harness.add("beyond my share", tenant="modest")
    assert asked(harness.talk()) == []


def test_tenant_that_has_had_more_tokens_by_a_step_takes_no_place_back() -> None:
    harness = flooded_harness()
    harness.add("first", tuple(range(LIMITS.max_num_batched_tokens + 1)), tenant="modest")
    assert asked(harness.talk()) == ["first"]
    harness.add("second", tenant="modest")
    assert asked(harness.talk()) == []


def test_tenant_takes_no_place_back_from_a_higher_class() -> None:
    harness = Harness(max_num_requests=2)
    harness.add("vip-0", tenant="heavy", priority=VIP)
    harness.add("vip-1", tenant="heavy", priority=VIP)
    harness.step()
    harness.add("mine", tenant="light")
    assert asked(harness.talk()) == []
