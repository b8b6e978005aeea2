"""What a step holds when prompts are long, batches are to fill, or a step time is to be kept."""

import random
from dataclasses import replace

from services.scheduler.core import SchedulerLimits, StepResult
from services.scheduler.core.token_budget import MIN_CHUNK
from tests.unit.scheduler.harness import LIMITS, NOW_MS, WORKER, WORKER_INFO, Harness

BASE_MS, MS_PER_TOKEN = 5.0, 0.5


def row_sizes(harness: Harness) -> list[int]:
    return [row.num_scheduled_tokens for row in harness.step().rows]


def test_long_prompts_progress_side_by_side_when_their_chunks_are_bounded() -> None:
    harness = Harness(long_prefill_token_threshold=3)
    harness.add("a", (1,) * 8)
    harness.add("b", (2,) * 8)
    assert row_sizes(harness) == [3, 3]
    assert row_sizes(harness) == [3, 3]
    assert row_sizes(harness) == [2, 2]
    assert row_sizes(harness) == [1, 1]


def test_short_prompt_is_not_held_up_by_a_long_one_when_chunks_are_bounded() -> None:
    harness = Harness(long_prefill_token_threshold=4)
    harness.add("long", (1,) * 20)
    harness.add("short", (2, 3), max_tokens=2)
    assert row_sizes(harness) == [4, 2]
    assert harness.outputs() == {"short": [50]}


def test_idle_worker_waits_for_its_batch_to_fill() -> None:
    harness = Harness(batch_wait_ms=20)
    harness.add("a")
    harness.talk()
    assert harness.scheduler.schedule(WORKER) is None
    assert harness.scheduler.next_begin_ms() == NOW_MS + 20
    harness.add("b", now_ms=NOW_MS + 10)
    harness.talk()
    assert harness.scheduler.schedule(WORKER) is None
    harness.scheduler.advance_time(NOW_MS + 20)
    assert row_sizes(harness) == [3, 3]
    assert harness.scheduler.next_begin_ms() is None


def test_batch_that_is_full_or_running_waits_for_nothing() -> None:
    harness = Harness(batch_wait_ms=20, max_num_requests=2)
    harness.add("a")
    harness.add("b")
    assert row_sizes(harness) == [3, 3]
    harness = Harness(batch_wait_ms=20)
    harness.add("a", max_tokens=9)
    harness.talk()
    harness.scheduler.advance_time(NOW_MS + 20)
    assert row_sizes(harness) == [3]
    harness.add("b", now_ms=NOW_MS + 21)
    assert row_sizes(harness) == [1, 3]


def test_nothing_waits_when_no_wait_is_set() -> None:
    harness = Harness()
    harness.add("a")
    harness.talk()
    assert harness.scheduler.next_begin_ms() is None
    assert row_sizes(harness) == [3]


def wide_harness(**limits: int) -> Harness:
    """A worker whose steps have up to 256 tokens, filled to 240."""
    return Harness(
        replace(LIMITS, max_num_batched_tokens=256, **limits), replace(WORKER_INFO, num_blocks=400, max_model_len=900)
    )


def test_step_takes_a_few_tokens_more_when_they_end_a_prompt() -> None:
    harness = wide_harness()
    harness.add("a", (1,) * (240 + 256), 2)
    assert row_sizes(harness) == [240]
    assert row_sizes(harness) == [256]
    harness.add("b", (2,) * 257, 2)
    assert row_sizes(harness) == [1, 239]
    assert row_sizes(harness) == [18]


def test_tokens_that_end_a_prompt_are_not_left_for_a_step_of_their_own_beside_others() -> None:
    harness = wide_harness()
    harness.add("a", (1,) * 100, 9)
    harness.add("b", (2,) * 150, 9)
    harness.add("c", (3,) * 300, 9)
    assert row_sizes(harness) == [100, 150]
    assert row_sizes(harness) == [1, 1, 238]
    harness.add("d", (4,) * 190, 9)
    assert row_sizes(harness) == [1, 1, 62, 190]


def test_no_step_exceeds_its_bound_and_no_prompt_is_left_behind() -> None:
    rng = random.Random(3)
    for _ in range(20):
        harness = wide_harness()
        lengths = [rng.randint(1, 800) for _ in range(4)]
        for index, length in enumerate(lengths):
            harness.add(f"request-{index}", (index,) * length, rng.randint(1, 5))
        num_computed = 0
        while num_computed < sum(lengths):
            sizes = row_sizes(harness)
            assert 0 < sum(sizes) <= 256
            num_computed += sum(sizes)
        harness.run_to_rest()
        assert len(harness.outputs()) == len(lengths)


def test_bounded_chunks_stay_bounded_at_the_end_of_a_prompt() -> None:
    harness = wide_harness(long_prefill_token_threshold=100)
    harness.add("a", (1,) * 103, 2)
    assert row_sizes(harness) == [100]
    assert row_sizes(harness) == [3]


def test_step_takes_no_more_where_that_ends_no_prompt() -> None:
    harness = wide_harness(long_prefill_token_threshold=100)
    harness.add("a", (1,) * 100, 2)
    harness.add("b", (2,) * 45, 2)
    harness.add("c", (3,) * 103, 2)
    assert row_sizes(harness) == [100, 45, 95]
    assert row_sizes(harness) == [1, 1, 8]


def timed_step(harness: Harness) -> float:
    """Step on a device whose steps take BASE_MS and MS_PER_TOKEN; return the time."""
    harness.talk()
    plan = harness.plan()
    time_ms = BASE_MS + MS_PER_TOKEN * sum(row.num_scheduled_tokens for row in plan.rows)
    result = harness.result_of(plan)
    harness.scheduler.apply(WORKER, StepResult(result.plan_id, result.sampled, (), round(time_ms * 1000)))
    return time_ms


def target_harness(target_itl_ms: float) -> Harness:
    """A worker of 6,400 slots, steps of up to 256 tokens."""
    limits = SchedulerLimits(
        max_num_batched_tokens=256, max_num_requests=64, run_ahead_depth=1, target_itl_ms=target_itl_ms
    )
    return Harness(limits, replace(WORKER_INFO, num_blocks=401, block_size=16, max_model_len=4000))


def test_chunks_shrink_until_running_streams_get_their_tokens_in_time() -> None:
    harness = target_harness(target_itl_ms=40)
    harness.add("stream", (1,) * 4, 200)
    harness.add("prompt", (2,) * 2000, 1)
    times = [timed_step(harness) for _ in range(12)]
    assert times[0] > 100  # nothing was known
    assert all(30 < time <= 40 for time in times[2:]), times


def test_prompts_progress_by_a_smallest_chunk_when_the_target_is_out_of_reach() -> None:
    harness = target_harness(target_itl_ms=1)
    harness.add("stream", (1,) * 4, 200)
    harness.add("prompt", (2,) * 600, 1)
    for _ in range(3):
        timed_step(harness)
    assert [row.num_scheduled_tokens for row in harness.step().rows] == [1, MIN_CHUNK]


def test_no_more_requests_run_than_decode_in_time() -> None:
    harness = target_harness(target_itl_ms=15)  # 20 tokens
    harness.add("first", (1,) * 200, 60)
    for _ in range(3):
        timed_step(harness)
    for index in range(40):
        harness.add(f"request-{index}", (index,) * 2, 30)
    for _ in range(20):
        timed_step(harness)
    assert 15 <= harness.scheduler.load().num_running <= 21


def test_prompts_of_a_tenant_that_has_its_places_take_half_of_a_step_while_another_contends() -> None:
    wide, roomy = replace(LIMITS, max_num_batched_tokens=64), replace(WORKER_INFO, num_blocks=40, max_model_len=99)
    harness = Harness(wide, roomy)
    harness.add("alone", tuple(range(60)), 1, tenant="heavy")
    harness.talk()
    assert [row.num_scheduled_tokens for row in harness.plan().rows] == [60]
    harness = Harness(wide, roomy)
    harness.add("long", tuple(range(60)), 1, tenant="heavy")
    harness.add("short", (1, 2, 3), 1, tenant="light")
    harness.talk()
    assert [row.num_scheduled_tokens for row in harness.step().rows] == [60, 3]
    harness.add("other", (4, 5, 6, 7), 1, tenant="light")
    for index in range(2):
        harness.add(f"long-{index}", tuple(range(200 + index, 260 + index)), 1, tenant="heavy")
    harness.talk()
    assert [row.num_scheduled_tokens for row in harness.plan().rows] == [4, 32]
