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

    ``max_draft_tokens`` is how many tokens the runner may guess for a row, ``chunk`` how many of one prompt a step
    computes; 0: as many as fit.
    """

    num_blocks: int
    block_size: int = 32
    num_host_blocks: int = 0
    max_model_len: int = 512
    max_num_batched_tokens: int = 64
    max_draft_tokens: int = 0
    max_num_requests: int = 16
    chunk: int = 0


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
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_num_requests=sizes.max_num_requests,
            run_ahead_depth=2,
            long_prefill_token_threshold=sizes.chunk,
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
        self._in_flight: dict[str, deque[scheduler.BatchPlan]] = {name: deque() for name in self._runner_by_worker}
        self._num_executed = 0
        self.outputs: dict[str, list[int]] = {}

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
        request_ids = [f"request-{index}" for index in range(len(prompts))]
        for index, (request_id, prompt) in enumerate(zip(request_ids, prompts, strict=True)):
            self.submit(request_id, prompt, num_outputs, sampling[index] if sampling else GREEDY)
        while self.advance():
            if lose_after_steps is not None and self._num_executed >= lose_after_steps and WORKER in self._in_flight:
                self._scheduler.close_worker(WORKER)
                del self._in_flight[WORKER]
        self.check_invariants()
        return [self.outputs[request_id] for request_id in request_ids]

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        num_outputs: int,
        params: scheduler.SamplingParams = GREEDY,
        priority: scheduler.PriorityClass = scheduler.PriorityClass.NORMAL,
    ) -> None:
        """Add a request, whose tokens then appear in ``outputs``."""
        self.outputs[request_id] = []
        self._scheduler.add_request(
            scheduler.Submission(
                request_id, "gateway", "tenant", "scope", "m", tuple(prompt), num_outputs, params, priority=priority
            ),
            now_ms=0,
        )

    def advance(self) -> bool:
        """Pass a message on, and for each worker make a plan or execute one; return whether there was any of it."""
        is_busy = self._talk()
        for name, in_flight in self._in_flight.items():
            plan = self._scheduler.schedule(name)
            if plan is not None:
                in_flight.append(plan)
            elif in_flight:
                self._execute(name, in_flight.popleft())
                self._num_executed += 1
            else:
                continue
            is_busy = True
        return is_busy

    def check_invariants(self) -> None:
        """Check both cores' laws."""
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
            self.outputs[event.request_id] += event.token_ids

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
