"""Which worker a request goes to."""

from dataclasses import replace

from services.scheduler.core.prefix_map import PIECE_TOKENS, PrefixMap, hash_pieces
from tests.unit.scheduler.harness import LIMITS, WORKER_INFO, Harness

LONG = replace(WORKER_INFO, num_blocks=400, max_model_len=1000)
SYSTEM_PROMPT = tuple(range(2 * PIECE_TOKENS))


def two_workers(max_num_requests: int = 8) -> Harness:
    limits = replace(LIMITS, max_num_requests=max_num_requests, max_num_batched_tokens=512)
    return Harness(limits, LONG, replace(LONG, name="worker-1"))


def placed(harness: Harness) -> dict[str, str]:
    message = harness.talk()
    return {} if message is None else {admit.request_id: admit.pool for admit in message.admits}


def test_hashes_of_pieces_depend_on_all_that_precedes_and_on_the_scope() -> None:
    pieces = hash_pieces("scope", SYSTEM_PROMPT + (1,) * (PIECE_TOKENS - 1))
    assert pieces == hash_pieces("scope", SYSTEM_PROMPT)
    assert len(pieces) == 2
    assert set(pieces).isdisjoint(hash_pieces("other", SYSTEM_PROMPT))
    assert hash_pieces("scope", (9, *SYSTEM_PROMPT[1:]))[1] != pieces[1]


def test_map_counts_hits_from_the_beginning_and_forgets_the_least_recently_used() -> None:
    prefixes = PrefixMap(3)
    prefixes.learn([1, 2, 3])
    assert prefixes.count_hits([1, 2, 3, 4]) == 3
    prefixes.learn([1, 9])
    assert prefixes.count_hits([1, 2, 3]) == 1
    assert prefixes.count_hits([3]) == 1
    prefixes.clear()
    assert prefixes.count_hits([1]) == 0


def test_request_follows_its_prefix_though_the_other_worker_is_emptier() -> None:
    harness = two_workers()
    harness.add("first", SYSTEM_PROMPT)
    harness.add("other", (7,) * 100)
    assert placed(harness) == {"first": "worker-0", "other": "worker-1"}
    harness.run_to_rest()
    harness.add("second", (*SYSTEM_PROMPT, 5))
    harness.add("third", (*SYSTEM_PROMPT, 6))
    assert placed(harness) == {"second": "worker-0", "third": "worker-0"}


def test_popular_prefix_spreads_when_its_worker_has_its_share() -> None:
    harness = two_workers()
    for index in range(8):
        harness.add(f"request-{index}", (*SYSTEM_PROMPT, index))
    workers = list(placed(harness).values())
    assert workers[:3] == ["worker-0", "worker-0", "worker-1"]
    assert (workers.count("worker-0"), workers.count("worker-1")) == (4, 4)


def test_prefix_is_private_to_its_scope() -> None:
    harness = two_workers()
    harness.add("first", SYSTEM_PROMPT)
    harness.add("filler", (7,) * 100)
    placed(harness)
    harness.run_to_rest()
    harness.add("a", (8,) * 3)
    harness.add("b", SYSTEM_PROMPT, cache_scope="other")
    assert placed(harness) == {"a": "worker-0", "b": "worker-1"}


def test_prefixes_are_forgotten_with_the_kv_cache() -> None:
    harness = two_workers()
    harness.add("other", (7,) * 100)
    harness.add("first", SYSTEM_PROMPT)
    assert placed(harness)["first"] == "worker-1"
    harness.run_to_rest()
    harness.manager = type(harness.manager)(epoch=8)
    harness.scheduler.reset_kv()
    harness.add("second", SYSTEM_PROMPT)
    assert placed(harness) == {"second": "worker-0"}


def test_draining_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    harness = two_workers()
    harness.add("first", SYSTEM_PROMPT)
    harness.talk()
    harness.scheduler.drain_worker("worker-0")
    harness.scheduler.drain_worker("unknown")
    harness.add("second", SYSTEM_PROMPT)
    assert placed(harness) == {"second": "worker-1"}
    harness.run_to_rest()
    assert {request_id: len(tokens) for request_id, tokens in harness.outputs().items()} == {"first": 4, "second": 4}


def test_worker_is_drained_once_it_has_answered_and_forgotten_everything() -> None:
    harness = two_workers()
    harness.add("first", SYSTEM_PROMPT)
    assert not harness.scheduler.is_drained("worker-0")  # nobody asked it to
    harness.talk()
    harness.scheduler.drain_worker("worker-0")
    harness.scheduler.drain_worker("worker-1")
    assert harness.scheduler.is_drained("worker-1")
    harness.talk()
    was_drained = []
    while (plan := harness.scheduler.schedule("worker-0")) is not None:
        was_drained.append(harness.scheduler.is_drained("worker-0"))
        harness.scheduler.apply("worker-0", harness.result_of(plan))
    assert plan is None
    assert was_drained
    assert not any(was_drained)
    assert harness.scheduler.is_drained("worker-0")
    assert harness.scheduler.load().workers[0].is_draining


def test_returning_worker_drains_no_more() -> None:
    harness = two_workers()
    harness.scheduler.drain_worker("worker-0")
    harness.scheduler.open_worker(LONG)
    harness.add("first", SYSTEM_PROMPT)
    harness.add("second", (3,))
    assert set(placed(harness).values()) == {"worker-0", "worker-1"}
