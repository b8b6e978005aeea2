"""The cores of scheduler and KV-cache manager around a real runner, without processes or wire: for tests of identity.

The pool may be told to be smaller than the runner's memory, so that requests preempt each other; run-ahead is on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.kv_cache.core import KVCacheManager, PoolUsage
from services.scheduler import core as scheduler
from services.worker import plan as worker
from services.worker.device_executor import StepRunner
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler

WORKER = "worker-0"
GREEDY = scheduler.SamplingParams()


@dataclass(frozen=True)
class Sizes:
    """Of the pool: at most the runner's own; ``num_host_blocks`` 0 lets preempted requests be computed again.

    ``max_draft_tokens`` is how many tokens the runner may guess for a row.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    max_model_len: int = 512
    max_num_batched_tokens: int = 64
    max_draft_tokens: int = 0


class CoreMesh:
    """One worker, or several.

    Args:
        runner: Executes the plans of the first worker; reset first.
        sizes: Of each pool.
        others: Runners of other workers, likewise.
    """

    def __init__(self, runner: StepRunner, sizes: Sizes, *others: StepRunner) -> None:
        self._runner_by_worker = {f"worker-{index}": each for index, each in enumerate((runner, *others))}
        self._manager = KVCacheManager(epoch=1)
        limits = scheduler.SchedulerLimits(
            max_num_batched_tokens=sizes.max_num_batched_tokens, max_num_requests=16, run_ahead_depth=2
        )
        self._scheduler = scheduler.Scheduler(limits, epoch=1)
        for name, each in self._runner_by_worker.items():
            each.reset()
            info = scheduler.WorkerInfo(
                name=name,
                epoch=1,
                num_blocks=sizes.num_blocks,
                block_size=sizes.block_size,
                max_model_len=sizes.max_model_len,
                model="m",
                weight_version="v",
                num_host_blocks=sizes.num_host_blocks,
                max_draft_tokens=sizes.max_draft_tokens,
            )
            self._scheduler.open_worker(info)
        self._outputs: dict[str, list[int]] = {}

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.load().num_preemptions

    @property
    def num_steps(self) -> int:
        return self._scheduler.load().num_steps

    @property
    def acceptance(self) -> list[tuple[int, int]]:
        """Guessed tokens, and those that came true, by their place in the guess."""
        load = self._scheduler.load()
        return list(zip(load.num_drafted_by_place, load.num_accepted_by_place, strict=True))

    @property
    def usage(self) -> PoolUsage:
        return self._manager.usage(WORKER)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_outputs: int,
        sampling: Sequence[scheduler.SamplingParams] = (),
        lose_after_steps: int | None = None,
    ) -> list[list[int]]:
        """Run prompts together to their end; return each one's output tokens.

        Args:
            prompts: As token ids.
            num_outputs: Tokens of each output.
            sampling: One for each prompt; empty: greedy.
            lose_after_steps: After so many steps of all workers the first is lost, with the plans in flight to it.
        """
        self._outputs = {f"request-{index}": [] for index in range(len(prompts))}
        for index, prompt in enumerate(prompts):
            params = sampling[index] if sampling else GREEDY
            self._scheduler.add_request(
                scheduler.Submission(
                    f"request-{index}", "gateway", "tenant", "scope", "m", tuple(prompt), num_outputs, params
                ),
                now_ms=0,
            )
        self._run_to_rest(lose_after_steps)
        return list(self._outputs.values())

    def _run_to_rest(self, lose_after_steps: int | None) -> None:
        in_flight: dict[str, deque[scheduler.BatchPlan]] = {name: deque() for name in self._runner_by_worker}
        num_executed = 0
        while True:
            is_busy = self._talk()
            for name in list(in_flight):
                plan = self._scheduler.schedule(name)
                if plan is not None:
                    in_flight[name].append(plan)
                elif in_flight[name]:
                    self._execute(name, in_flight[name].popleft())
                    num_executed += 1
                else:
                    continue
                is_busy = True
            if lose_after_steps is not None and num_executed >= lose_after_steps and WORKER in in_flight:
                self._scheduler.close_worker(WORKER)
                del in_flight[WORKER]
            if not is_busy:
                break
        self._scheduler.check_invariants()
        self._manager.check_invariants()

    def _execute(self, name: str, plan: scheduler.BatchPlan) -> None:
        result = self._runner_by_worker[name].execute(to_worker(plan))
        sampled = tuple((token.handle, token.token_id) for token in result.sampled)
        failed = tuple(error.handle for error in result.row_errors)
        drafts = tuple((draft.handle, draft.num_tokens) for draft in result.drafts)
        self._scheduler.apply(name, scheduler.StepResult(result.plan_id, sampled, failed, 0, drafts))
        for event in self._scheduler.take_events():
            assert event.finish is None or event.finish.reason is scheduler.FinishReason.LENGTH, event
            self._outputs[event.request_id] += event.token_ids

    def _talk(self) -> bool:
        message = self._scheduler.take_kv_message()
        if message is not None:
            self._scheduler.apply_kv_reply(reply_to_scheduler(self._manager.apply_batch(message_to_kv_cache(message))))
        return message is not None


def to_worker(plan: scheduler.BatchPlan) -> worker.BatchPlan:
    """Translate a plan, as the wire does."""
    return worker.BatchPlan(
        plan.plan_id,
        tuple(_to_new_request(request) for request in plan.new_requests),
        tuple(
            worker.ScheduledRow(
                worker.Handle(row.handle),
                row.num_scheduled_tokens,
                tuple(map(worker.BlockId, row.new_block_ids)),
                row.is_sampling,
                row.max_draft_tokens,
            )
            for row in plan.rows
        ),
        tuple(map(worker.Handle, plan.finished_handles)),
        tuple(
            worker.BlockCopy(worker.CopyDirection(copy.direction.value), worker.BlockId(copy.block_id), copy.host_slot)
            for copy in plan.block_copies
        ),
    )


def _to_new_request(request: scheduler.NewRequest) -> worker.NewRequest:
    params = request.sampling
    return worker.NewRequest(
        worker.Handle(request.handle),
        request.request_id,
        request.token_ids,
        request.num_prompt_tokens,
        worker.SamplingParams(
            params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.sample_index
        ),
        tuple(map(worker.BlockId, request.block_ids)),
        request.num_computed_tokens,
    )
