"""Who is taken in, who gets blocks, and who waits for whom."""

from dataclasses import replace

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core import Admit, Finish, FinishReason, KVMessage, RequestEvent, Scheduler
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler
from tests.unit.scheduler.harness import EPOCH, LIMITS, NOW_MS, WORKER, WORKER_INFO, Harness, submission


def refusal(scheduler: Scheduler, *arguments: object, **changes: object) -> ErrorReason:
    with pytest.raises(EngineError) as error:
        scheduler.add_request(submission("x", *arguments, **changes), NOW_MS)  # type: ignore[arg-type]
    return error.value.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ()}, ErrorReason.INVALID_REQUEST),
        ({"max_tokens": 0}, ErrorReason.INVALID_REQUEST),
        ({"deadline_ms": NOW_MS}, ErrorReason.DEADLINE_EXCEEDED),
        ({"model": "other"}, ErrorReason.MODEL_NOT_FOUND),
        ({"prompt": (1,) * 24}, ErrorReason.PROMPT_TOO_LONG),
        ({"prompt": (1,) * 20, "output_token_ids": (1,) * 4}, ErrorReason.PROMPT_TOO_LONG),
    ],
)
def test_submission_that_can_never_run_is_refused(changes: dict[str, object], reason: ErrorReason) -> None:
    harness = Harness()
    assert refusal(harness.scheduler, **changes) is reason
    assert harness.scheduler.is_idle() is False  # only the opening of the pool is left to be said
    harness.talk()
    assert harness.scheduler.is_idle() is True


def test_submission_that_needs_one_slot_more_than_the_pool_has_is_refused() -> None:
    harness = Harness(LIMITS, replace(WORKER_INFO, num_blocks=5))  # 16 slots
    assert refusal(harness.scheduler, (1,) * 10, 8) is ErrorReason.EXCEEDS_KV_CAPACITY
    harness.add("fits", (1,) * 10, 7)
    harness.run_to_rest()
    assert harness.events()[0].finish == Finish(FinishReason.LENGTH, 10, 7, 0)


def test_request_that_fits_only_one_worker_runs_there() -> None:
    small = replace(WORKER_INFO, name="small", num_blocks=3)
    harness = Harness(LIMITS, small, WORKER_INFO)
    harness.add("a", (1,) * 12)
    assert harness.step(WORKER).new_requests[0].request_id == "a"


def test_duplicate_of_a_live_request_is_refused_and_of_a_finished_one_is_not() -> None:
    harness = Harness()
    harness.add("x")
    assert refusal(harness.scheduler) is ErrorReason.DUPLICATE_REQUEST
    harness.run_to_rest()
    harness.add("x")


def test_submission_is_refused_when_the_queue_is_full_of_requests() -> None:
    harness = Harness(max_waiting_requests=1)
    harness.add("a")
    assert refusal(harness.scheduler) is ErrorReason.QUEUE_FULL
    harness.talk()  # a runs now
    harness.add("x")


def test_submission_is_refused_when_the_queue_is_full_of_tokens_unless_it_waits_alone() -> None:
    harness = Harness(max_waiting_tokens=4)
    harness.add("a", (1,) * 10)
    assert refusal(harness.scheduler, (1,)) is ErrorReason.QUEUE_FULL


def test_admission_asks_first_come_first_served_while_places_remain() -> None:
    harness = Harness(max_num_requests=2)
    for request_id in ("a", "b", "c"):
        harness.add(request_id, (1, 2, 3), max_tokens=9)
    assert harness.talk() == KVMessage(
        1,
        open_pools=(WORKER_INFO.pool_spec,),
        admits=(
            Admit(101, WORKER, "scope", (1, 2, 3), 5, "a", "tenant", max_num_tokens=11),
            Admit(102, WORKER, "scope", (1, 2, 3), 5, "b", "tenant", max_num_tokens=11),
        ),
    )
    assert harness.scheduler.load().num_waiting == 1
    assert harness.talk() is None


def test_at_most_one_message_is_unanswered() -> None:
    harness = Harness()
    harness.add("a")
    assert harness.scheduler.take_kv_message() is not None
    harness.add("b")
    assert harness.scheduler.take_kv_message() is None


def test_denied_head_is_not_overtaken_and_asks_again_only_after_a_request_has_ended() -> None:
    harness = Harness(LIMITS, replace(WORKER_INFO, num_blocks=5, max_model_len=16))
    harness.add("a", (1,) * 4, max_tokens=6)
    harness.add("b", (2,) * 12)
    harness.add("c", (3,))
    harness.talk()
    assert harness.scheduler.load().num_running == 1
    asked = []
    while harness.scheduler.load().num_waiting == 2:
        message = harness.talk()
        if message is not None and message.admits:
            asked.append([admit.request_id for admit in message.admits])
        elif (plan := harness.scheduler.schedule(WORKER)) is not None:
            harness.apply(plan)
    # Once while a's prompt was committed (its blocks might have been shared), then when a had ended.
    assert asked == [["b", "c"], ["b", "c"]]
    harness.run_to_rest()
    assert {request_id: len(tokens) for request_id, tokens in harness.outputs().items()} == {"a": 6, "b": 4, "c": 4}


def test_denial_of_a_request_that_has_ended_meanwhile_holds_nobody_back() -> None:
    harness = Harness(LIMITS, replace(WORKER_INFO, num_blocks=5, max_model_len=16))
    harness.add("a", (1,) * 4, max_tokens=6)
    harness.talk()
    harness.add("b", (2,) * 12)
    message = harness.scheduler.take_kv_message()
    assert message is not None
    harness.scheduler.abort_request("b")
    harness.scheduler.apply_kv_reply(reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message))))
    harness.add("c", (3,))
    assert [admit.request_id for admit in harness.talk().admits] == ["c"]  # type: ignore[union-attr]
    assert harness.scheduler.load().num_running == 2


def test_requests_go_to_the_worker_with_the_fewest() -> None:
    harness = Harness(LIMITS, WORKER_INFO, replace(WORKER_INFO, name="worker-1"))
    for request_id in ("a", "b", "c"):
        harness.add(request_id)
    message = harness.talk()
    assert message is not None
    assert [(admit.request_id, admit.pool) for admit in message.admits] == [
        ("a", WORKER),
        ("b", "worker-1"),
        ("c", WORKER),
    ]


def test_request_goes_only_to_a_worker_of_its_model() -> None:
    harness = Harness(LIMITS, WORKER_INFO, replace(WORKER_INFO, name="worker-1", model="other"))
    harness.add("a", model="other")
    harness.add("b", model="other")
    harness.add("c", model="")
    message = harness.talk()
    assert message is not None
    assert [(admit.request_id, admit.pool) for admit in message.admits] == [
        ("a", "worker-1"),
        ("b", "worker-1"),
        ("c", WORKER),
    ]


def test_request_waits_while_no_worker_is_known_and_runs_when_one_comes() -> None:
    scheduler = Scheduler(LIMITS, EPOCH)
    scheduler.add_request(submission("a"), NOW_MS)
    assert scheduler.take_kv_message() is None
    scheduler.open_worker(WORKER_INFO)
    message = scheduler.take_kv_message()
    assert message is not None
    assert [admit.request_id for admit in message.admits] == ["a"]


def test_waiting_request_that_does_not_fit_the_worker_that_comes_ends_with_an_error() -> None:
    scheduler = Scheduler(LIMITS, EPOCH)
    scheduler.add_request(submission("a", (1,) * 30), NOW_MS)
    scheduler.add_request(submission("b"), NOW_MS)
    scheduler.open_worker(WORKER_INFO)
    (event,) = scheduler.take_events()
    assert event.request_id == "a"
    assert event.finish is not None
    assert event.finish.error is not None
    assert event.finish.error.reason is ErrorReason.PROMPT_TOO_LONG


def test_resumed_request_continues_after_the_tokens_that_the_client_has() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3), max_tokens=4, output_token_ids=(8, 9))
    plan = harness.step()
    assert plan.new_requests[0].token_ids == (1, 2, 3, 8, 9)
    assert plan.new_requests[0].num_prompt_tokens == 3
    harness.run_to_rest()
    assert harness.events() == [RequestEvent("a", "gateway", 2, (50, 51), Finish(FinishReason.LENGTH, 3, 4, 0))]


@pytest.mark.parametrize(
    ("output_token_ids", "finish"),
    [
        ((8, 9), Finish(FinishReason.STOP, 3, 2, 0, stop_token_id=9)),
        ((8, 8, 8, 8), Finish(FinishReason.LENGTH, 3, 4, 0)),
    ],
)
def test_request_resumed_after_its_last_token_ends_at_once(output_token_ids: tuple[int, ...], finish: Finish) -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3), max_tokens=4, eos_token_ids=(9,), output_token_ids=output_token_ids)
    assert harness.events() == [RequestEvent("a", "gateway", len(output_token_ids), (), finish)]
    harness.talk()
    assert harness.scheduler.is_idle() is True
