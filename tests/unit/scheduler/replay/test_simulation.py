"""Arrivals played through the real core with simulated workers and blocks."""

import random

import pytest

from services.kv_cache.core import KVCacheManager
from services.scheduler.core import KVMessage, KVReply, PolicySettings, PriorityClass, SchedulerLimits, WorkerInfo
from services.scheduler.core.batch_plan import SamplingParams
from services.scheduler.core.policies import PolicyName
from services.scheduler.core.submission import Submission
from services.scheduler.plan_log.workload import Arrival, Timeline, Workload
from services.scheduler.replay.simulation import ArrivalSimulation
from services.scheduler.replay.step_time import StepTimeModel
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler

START_US = 1_700_000_000_000_000
STEP_TIME = StepTimeModel(base_us=1000.0, prefill_token_us=100.0, decode_row_us=500.0)
LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_requests=4)


def arrival(
    name: str,
    offset_ms: int = 0,
    *,
    prompt: tuple[int, ...] = (1, 2, 3, 4),
    max_tokens: int = 3,
    cancelled_ms: int | None = None,
    deadline_offset_ms: int | None = None,
    tenant: str = "",
    priority: PriorityClass = PriorityClass.NORMAL,
) -> Arrival:
    submission = Submission(
        request_id=name,
        gateway="gateway",
        tenant=tenant,
        cache_scope="",
        model="",
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        priority=priority,
        deadline_ms=None if deadline_offset_ms is None else START_US // 1000 + deadline_offset_ms,
    )
    cancelled_us = None if cancelled_ms is None else START_US + cancelled_ms * 1000
    return Arrival(submission, START_US + offset_ms * 1000, cancelled_us, None)


def workload(*arrivals: Arrival, num_blocks: int = 64, limits: SchedulerLimits = LIMITS) -> Workload:
    worker = WorkerInfo("worker-0", 1, num_blocks, 16, 512, "m", "w")
    return Workload(limits, (worker,), arrivals, (), 0)


def simulation(work: Workload, policy: PolicyName = "fcfs") -> ArrivalSimulation:
    return ArrivalSimulation(work, PolicySettings(policy=policy), STEP_TIME)


def play(work: Workload, policy: PolicyName = "fcfs") -> list[Timeline | None]:
    playing = simulation(work, policy)
    timelines = playing.run()
    playing._core.check_invariants()
    assert playing._core.is_idle()
    return timelines


def relative_ms(timeline: Timeline | None) -> list[float]:
    assert timeline is not None
    return [(time_us - START_US) / 1000 for time_us in timeline.token_times_us]


def test_lone_request_gets_its_tokens_at_the_times_of_its_steps() -> None:
    (timeline,) = play(workload(arrival("a")))
    # 4 prompt tokens in a row: 1 + 0.4 ms; then two rows of one token: 1 + 0.5 ms each.
    assert relative_ms(timeline) == [1.4, 2.9, 4.4]
    assert timeline is not None
    assert timeline.ended_us == timeline.token_times_us[-1]


def test_second_request_waits_for_a_place() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_requests=1)
    first, second = play(workload(arrival("a"), arrival("b", 1), limits=limits))
    assert first is not None
    assert second is not None
    assert second.token_times_us[0] > first.ended_us


def test_shared_prefix_is_computed_once() -> None:
    prompt = tuple(range(40))
    first, second = play(workload(arrival("a", prompt=prompt), arrival("b", 100, prompt=prompt)))
    assert relative_ms(first)[0] == 5.0  # 40 tokens
    assert relative_ms(second)[0] == 100 + 1.8  # 8 tokens: two full blocks are hit


def test_cancelled_request_ends_without_a_timeline_and_frees_its_place() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_requests=1)
    first, second = play(workload(arrival("a", max_tokens=400, cancelled_ms=20), arrival("b", 1), limits=limits))
    assert first is None
    assert 20 < relative_ms(second)[0] < 25


def test_deadline_ends_a_request() -> None:
    late, ended = play(workload(arrival("a", max_tokens=400, deadline_offset_ms=50), arrival("b", 60)))
    assert late is None
    assert ended is not None


def test_refused_request_has_no_timeline() -> None:
    too_long, ended = play(workload(arrival("a", prompt=tuple(range(600))), arrival("b")))
    assert too_long is None
    assert ended is not None


def test_policy_decides_who_waits() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_requests=1)
    low = [arrival(f"batch-{i}", i, max_tokens=20, priority=PriorityClass.BATCH) for i in range(5)]
    vip = arrival("vip", 10, priority=PriorityClass.VIP)
    work = workload(*low, vip, limits=limits)
    by_class, by_time = play(work, "priority")[-1], play(work, "fcfs")[-1]
    assert by_class is not None
    assert by_time is not None
    assert by_class.ended_us < by_time.ended_us


def random_workload(seed: int, num_blocks: int) -> Workload:
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(1000) for _ in range(rng.randint(1, 70))) for _ in range(4)]
    arrivals = []
    for index in range(60):
        own = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 30)))
        arrivals.append(
            arrival(
                f"r{index}",
                rng.randint(0, 800),
                prompt=rng.choice(prefixes) + own,
                max_tokens=rng.randint(1, 40),
                tenant=rng.choice("ab"),
            )
        )
    return workload(*sorted(arrivals, key=lambda each: each.arrived_us), num_blocks=num_blocks)


class RealManager:
    """The KV-cache manager itself, in the place of its model."""

    def __init__(self) -> None:
        self._manager = KVCacheManager(epoch=1)

    def apply(self, message: KVMessage) -> KVReply:
        return reply_to_scheduler(self._manager.apply_batch(message_to_kv_cache(message)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["fcfs", "composed"])
def test_model_of_the_blocks_gives_the_timelines_of_the_real_manager(seed: int, policy: PolicyName) -> None:
    work = random_workload(seed, num_blocks=200)
    with_manager = simulation(work, policy)
    with_manager._kv = RealManager()  # type: ignore[assignment]
    assert play(work, policy) == with_manager.run()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline", "composed"])
def test_small_pool_serves_everybody_and_comes_to_rest(seed: int, policy: PolicyName) -> None:
    assert None not in play(random_workload(seed, num_blocks=14), policy)


def test_same_workload_gives_the_same_timelines() -> None:
    assert play(random_workload(9, num_blocks=14)) == play(random_workload(9, num_blocks=14))
