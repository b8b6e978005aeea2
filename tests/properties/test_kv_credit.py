"""Credit in numbers: in steady decoding, which share of steps waits for the KV-cache manager when its answer is late?

Both cores are the real ones; the manager's answer arrives a given number of steps after the question.
"""

from collections import deque

import pytest

from services.kv_cache.core import KVCacheManager
from services.scheduler.core import (
    KVReply,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    StepResult,
    Submission,
    WorkerInfo,
)
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler

WORKER = "worker-0"
NUM_REQUESTS = 16
MAX_TOKENS = 300
CREDIT_TOKENS = SchedulerLimits().credit_tokens


def share_of_steps_that_wait(answer_delay_steps: int, run_ahead_depth: int) -> float:
    """Decode 16 requests of unequal prompts; a step waits if a request that runs has no row in it."""
    scheduler = Scheduler(SchedulerLimits(run_ahead_depth=run_ahead_depth), epoch=1)
    manager = KVCacheManager(epoch=1)
    scheduler.open_worker(WorkerInfo(WORKER, 1, 1000, 16, 4096, "m", "v"))
    for index in range(NUM_REQUESTS):
        prompt = tuple(range(index, 2 * index + 20))
        submission = Submission(
            f"request-{index}", "gateway", "tenant", "scope", "m", prompt, MAX_TOKENS, SamplingParams(seed=index)
        )
        scheduler.add_request(submission, 0)
    replies: deque[tuple[int, KVReply]] = deque()
    results: deque[StepResult] = deque()
    num_sampled_by_handle: dict[int, int] = {}
    step = num_steps = num_waiting_steps = 0
    while scheduler.load().num_waiting + scheduler.load().num_running:
        step += 1
        while replies and replies[0][0] <= step:
            scheduler.apply_kv_reply(replies.popleft()[1])
        if len(results) == run_ahead_depth:
            scheduler.apply(WORKER, results.popleft())
        plan = scheduler.schedule(WORKER)
        message = scheduler.take_kv_message()
        if message is not None:
            reply = reply_to_scheduler(manager.apply_batch(message_to_kv_cache(message)))
            replies.append((step + answer_delay_steps, reply))
        if plan is None:
            if results:
                scheduler.apply(WORKER, results.popleft())
            continue
        num_sampled_by_handle.update((new.handle, 0) for new in plan.new_requests)
        planned = {row.handle for row in plan.rows}
        running = {handle for handle, num_sampled in num_sampled_by_handle.items() if num_sampled < MAX_TOKENS}
        num_steps += bool(running)
        num_waiting_steps += bool(running - planned)
        sampling = [row.handle for row in plan.rows if row.is_sampling]
        for handle in sampling:
            num_sampled_by_handle[handle] += 1
        results.append(StepResult(plan.plan_id, tuple((handle, step % 90) for handle in sampling)))
    assert num_steps >= MAX_TOKENS
    assert sum(num_sampled_by_handle.values()) == NUM_REQUESTS * MAX_TOKENS
    return num_waiting_steps / num_steps


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead_depth", [1, 2])
def test_no_step_waits_while_an_answer_takes_half_the_credit_in_steps_or_less(run_ahead_depth: int) -> None:
    # Half, since at most one message is under way: an ask may have to wait for the answer before it.
    for answer_delay_steps in range(1, CREDIT_TOKENS // 2 + 1):
        assert share_of_steps_that_wait(answer_delay_steps, run_ahead_depth) == 0.0


@pytest.mark.slow
def test_steps_do_wait_when_an_answer_takes_longer_than_the_credit() -> None:
    assert share_of_steps_that_wait(3 * CREDIT_TOKENS, run_ahead_depth=2) > 0.01
