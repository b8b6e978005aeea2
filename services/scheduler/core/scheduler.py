"""The scheduler: which tokens of which requests each worker computes next, and what becomes of the results.

The one rule: each request has tokens known and tokens computed, and a step lets the second catch up with the first (see
:mod:`request` for the picture). Prompts, prefix hits, recomputation after a preemption and decoding are all the same
to it.

Pure and synchronous: the shell calls, in any order that events give it,

- ``add_request``, ``abort_request``, ``expire_deadlines`` when clients want something,
- ``take_kv_message`` and ``apply_kv_reply`` towards the KV-cache manager,
- ``schedule`` and ``apply`` towards each worker,
- ``take_events`` to tell the gateways,

and ``open_worker``, ``close_worker``, ``reset_kv`` when another process comes or goes. Every submitted request gets
exactly one event with a finish; after that nothing of it is left. The laws are those of :mod:`invariants`.
"""

from services.common.errors import EngineError, ErrorReason
from services.common.verify import require
from services.scheduler.core.batch_plan import NOT_A_NUMBER, BatchPlan, StepResult
from services.scheduler.core.deadlines import (
    cannot_make_deadline,
    deadline_error,
    fastest_step_ms,
    max_tokens_a_step,
)
from services.scheduler.core.drafts import DraftCounts, apply_drafting_rows, grant_drafts
from services.scheduler.core.events import FinishReason, RequestEvent
from services.scheduler.core.handles import SchedulerHandles, list_handles
from services.scheduler.core.invariants import check_scheduler_state
from services.scheduler.core.kv_broker import KVBroker
from services.scheduler.core.kv_messages import KVMessage, KVReply
from services.scheduler.core.lane import Lane, WorkerInfo
from services.scheduler.core.limits import SchedulerLimits, SchedulerLoad, WorkerLoad
from services.scheduler.core.placement import check_can_be_served, find_misfit_everywhere, max_places, quota_error
from services.scheduler.core.policies import DEFAULT_POLICY, PolicySettings, make_policy
from services.scheduler.core.prefix_map import PIECE_TOKENS, PrefixMap
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.request_book import RequestBook, is_waiting, make_finish, natural_end
from services.scheduler.core.submission import Submission
from services.scheduler.core.tenant_ledger import TenantLedger
from services.scheduler.core.timeline_events import RequestTimeline
from services.scheduler.core.token_budget import budget_within_target, plan_rows


class Scheduler:
    """All requests and all workers of one cell.

    Args:
        limits: Bounds of a step and of the queue.
        epoch: Of this process life (uint64); handles count up from it, so those of two lives never meet.
        policy_settings: Who goes first.
    """

    def __init__(self, limits: SchedulerLimits, epoch: int, policy_settings: PolicySettings = DEFAULT_POLICY) -> None:
        self._limits = limits
        self._lane_by_worker: dict[str, Lane] = {}
        self._last_plan_id_by_worker: dict[str, int] = {}
        self._policy = make_policy(policy_settings)
        self._book = RequestBook(limits, self._policy, TenantLedger(dict(policy_settings.tenant_weights)))
        self._kv = KVBroker(limits, epoch + 1, self._policy, self._book, self._lane_by_worker)
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_sampled_tokens = 0
        self._drafts = DraftCounts()

    # The step: plan, execute elsewhere, apply.

    def schedule(self, worker: str) -> BatchPlan | None:
        """Plan the worker's next step.

        Returns:
            The plan, to be sent at once; None when there is nothing to do or enough plans are in flight. A plan without
            rows only lets the worker forget requests or copy blocks.
        """
        lane = self._lane_by_worker.get(worker)
        if lane is None or len(lane.in_flight) >= self._limits.run_ahead_depth:
            return None
        if self._limits.batch_wait_ms and self._is_filling(lane):
            return None
        step = plan_rows(lane.running.values(), self._limits, lane.step_time, self._is_held_back)
        if lane.info.max_draft_tokens:
            budget = budget_within_target(self._limits, lane.step_time)
            grant_drafts(step, lane.running, budget, lane.info.max_draft_tokens)
        if not step.rows and not lane.has_errands:
            return None
        for request in step.low_on_slots:
            self._kv.ask_blocks(request)
        plan = lane.put_in_flight(step)
        if step.has_chunks:
            step.note_chunks_planned(lane.running, self._book.now_ms)
        return plan

    def apply(self, worker: str, result: StepResult) -> None:
        """Take up what a step computed and sampled.

        A row whose request has left the worker since (ended, preempted) is dead: its handle is not the request's any
        more, and what it computed is thrown away. A result that belongs to no plan in flight is ignored: the worker was
        lost and has come back since.

        Raises:
            InvariantError: the result is out of order, or lacks a token that its plan samples, or has too many.
        """
        lane = self._lane_by_worker.get(worker)
        step = lane.pop_in_flight(result.plan_id) if lane is not None else None
        if lane is None or step is None:
            return
        running, num_step_tokens = lane.running, step.num_tokens
        if lane.info.max_draft_tokens:
            step.note_step(running)
        if step.num_draft_tokens:
            apply_drafting_rows(step, running, result, self._drafts, self._take_token, self._fail)
            num_step_tokens += sum(num_drafted for _, num_drafted in result.drafts) - step.num_draft_tokens
        token_id_by_handle = dict(result.sampled)
        for handle, num_tokens, _, is_sampling, max_draft_tokens in step.rows:
            request = running.get(handle)
            if request is None or max_draft_tokens:
                continue
            if handle in result.failed_handles:
                self._fail(request, NOT_A_NUMBER)
                continue
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens >= request.commit_at:
                self._kv.note_computed(request)
            if is_sampling:
                token_id = token_id_by_handle.get(handle)
                if token_id is None:
                    require(False, "each sampling row yields a token", handle=handle)
                else:
                    self._append_output(request, token_id)
        if step.has_chunks:
            step.note_chunks_computed(lane.running, self._book.now_ms)
        if num_step_tokens and result.device_time_us:
            time_ms = result.device_time_us / 1000
            lane.step_time.note(num_step_tokens, time_ms)
            if self._policy.has_tenants:
                self._book.ledger.note_step(time_ms, lane.step_time)
        self._num_steps += 1
        self._num_scheduled_tokens += num_step_tokens
        self._num_sampled_tokens += len(result.sampled)

    def apply_failure(self, worker: str, plan_id: int, reason: str) -> None:
        """End, with STEP_FAILED, the requests that had a row in a plan that the worker could not execute.

        The worker may not have learnt the plan's new requests; it is told to forget them all the same.
        """
        lane = self._lane_by_worker.get(worker)
        step = lane.pop_in_flight(plan_id) if lane is not None else None
        if lane is not None and step is not None:
            for row in step.rows:
                request = lane.running.get(row.handle)
                if request is not None:
                    self._fail(request, reason)

    def can_schedule(self, worker: str) -> bool:
        """Tell whether ``schedule`` may have a plan; False is certain, True costs a call to find out."""
        lane = self._lane_by_worker.get(worker)
        return (
            lane is not None
            and len(lane.in_flight) < self._limits.run_ahead_depth
            and bool(lane.running or lane.has_errands)
        )

    # Requests.

    def add_request(self, submission: Submission, now_ms: int) -> None:
        """Take a request in; its events follow.

        Raises:
            EngineError: INVALID_REQUEST, DUPLICATE_REQUEST, QUEUE_FULL, DEADLINE_EXCEEDED, or, when workers are known,
                MODEL_NOT_FOUND, PROMPT_TOO_LONG, EXCEEDS_KV_CAPACITY. The request is not taken in then.
        """
        self._book.advance_time(now_ms)
        check_can_be_served(submission, now_ms, [lane.info for lane in self._lane_by_worker.values()])
        request = self._book.add(submission)
        reason = natural_end(request)
        if reason is not None:
            self._end(request, reason)  # resumed after its last token, whose finish the client has not seen

    def is_prompt_pending(self, request_id: str) -> bool:
        """Tell whether a request is live and has no output token yet, so that its prompt may still be computed."""
        request = self._book.request_by_id.get(request_id)
        return request is not None and request.num_output_tokens == 0

    def abort_request(self, request_id: str) -> bool:
        """End a live request as CANCELLED. Idempotent.

        Returns:
            Whether it was live.
        """
        request = self._book.request_by_id.get(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.CANCELLED)
        return True

    def abort_gateway(self, gateway: str) -> None:
        """End every live request of a gateway that is gone, and drop its events, since nobody is left to read them."""
        for request in list(self._book.request_by_id.values()):
            if request.submission.gateway == gateway:
                self._end(request, FinishReason.CANCELLED)
        self._book.drop_events(gateway)

    def expire_deadlines(self, now_ms: int) -> None:
        """End with DEADLINE_EXCEEDED every live request whose deadline is at or before ``now_ms``."""
        self._book.advance_time(now_ms)
        for request in self._book.find_expired(now_ms):
            self._end(request, FinishReason.ERROR, deadline_error(has_passed=True))

    def end_hopeless(self, now_ms: int) -> None:
        """End with DEADLINE_EXCEEDED, under a policy that knows deadlines, those that cannot make theirs any more.

        Visits every live request that has a deadline.
        """
        lanes = self._lane_by_worker.values()
        step_ms, num_tokens_a_step = fastest_step_ms(lanes), max_tokens_a_step(lanes)
        if self._policy.has_deadlines and step_ms:
            for request in self._book.with_deadlines():
                if cannot_make_deadline(request, now_ms, step_ms, self._limits, num_tokens_a_step):
                    self._end(request, FinishReason.ERROR, deadline_error(has_passed=False))

    def advance_time(self, now_ms: int) -> None:
        """Tell the time; ageing, filling batches and retry hints follow from it."""
        self._book.advance_time(now_ms)

    def next_begin_ms(self) -> int | None:
        """Return when, later than now, a worker need wait no longer for its batch to fill; None when none does."""
        if not self._limits.batch_wait_ms:
            return None
        times = [lane.begins_at_ms(self._limits) for lane in self._lane_by_worker.values()]
        return min((time for time in times if time is not None and time > self._book.now_ms), default=None)

    def next_deadline_ms(self) -> int | None:
        """Return when ``expire_deadlines`` is due next; None when no live request has a deadline."""
        return self._book.next_deadline_ms()

    def take_events(self) -> list[RequestEvent]:
        """Return the news since the last call, at most one event per request."""
        return self._book.take_events()

    # Other processes.

    def open_worker(self, info: WorkerInfo) -> None:
        """Take a worker into service, empty; one of the same name is closed first.

        Waiting requests that could never run on any worker that has their model end with an error.
        """
        self.close_worker(info.name)
        last_plan_id = self._last_plan_id_by_worker.get(info.name, 0)
        prefixes = PrefixMap(info.num_usable_slots // PIECE_TOKENS)
        lane = Lane(info, self._limits.credit_tokens + info.max_draft_tokens, last_plan_id, prefixes)
        self._lane_by_worker[info.name] = lane
        self._book.ledger.set_num_workers(len(self._lane_by_worker))
        self._kv.open_lane(lane)
        infos = [lane.info for lane in self._lane_by_worker.values()]
        for request in list(self._book.queue):
            request.misfit_pools -= {info.name}
            misfit = find_misfit_everywhere(infos, request.submission, len(request.token_ids))
            if misfit is not None:
                self._end(request, FinishReason.ERROR, misfit)

    def close_worker(self, worker: str) -> None:
        """Take a worker out of service: its requests wait again with all their tokens, before all later arrivals.

        Idempotent. Results that are still under way from it will be ignored.
        """
        lane = self._lane_by_worker.pop(worker, None)
        if lane is not None:
            self._last_plan_id_by_worker[worker] = lane.last_plan_id
            self._book.ledger.set_num_workers(len(self._lane_by_worker))
            self._kv.close_lane(lane)

    def drain_worker(self, worker: str) -> None:
        """Give a worker nothing new; what runs there ends there. Idempotent."""
        lane = self._lane_by_worker.get(worker)
        if lane is not None:
            lane.is_draining = True

    def is_drained(self, worker: str) -> bool:
        """Tell whether a worker that drains, or is closed, has nothing left to do."""
        lane = self._lane_by_worker.get(worker)
        return lane is None or (lane.is_draining and lane.is_empty)

    def reset_kv(self) -> None:
        """Begin anew with an empty KV-cache manager: all running requests wait again, all pools are opened again."""
        self._kv.reset()

    def take_kv_message(self) -> KVMessage | None:
        """Return what there is to say to the KV-cache manager; None when nothing is, or while a reply is awaited."""
        return self._kv.take_message()

    def apply_kv_reply(self, reply: KVReply) -> None:
        """Take up a reply; one that is not awaited any more is ignored.

        Requests of a tenant that may never hold enough blocks for them end with EXCEEDS_KV_CAPACITY.
        """
        for request in self._kv.apply_reply(reply):
            self._end(request, FinishReason.ERROR, quota_error(request))

    # Introspection.

    def explain(self, request_id: str, tenant: str | None = None) -> list[RequestTimeline]:
        """Return the timelines of a request and its choices, as ``tenant`` may see them; None sees all.

        Visits all live and all kept requests. Empty when none is known, or it is another tenant's.
        """
        return self._book.explain(request_id, tenant)

    def list_handles(self) -> SchedulerHandles:
        """Return every handle that may still be spoken of; see :mod:`handles`."""
        return list_handles(self._lane_by_worker.values(), self._kv.outbox)

    def load(self) -> SchedulerLoad:
        """Figures of now, and counts since the start."""
        lanes = self._lane_by_worker.values()
        num_running = sum(len(lane.running) for lane in lanes)
        return SchedulerLoad(
            num_waiting=len(self._book.request_by_id) - num_running,
            num_waiting_tokens=self._book.room.num_tokens,
            num_running=num_running,
            num_preemptions=self._kv.num_preemptions,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_sampled_tokens=self._num_sampled_tokens,
            num_drafted_by_place=tuple(self._drafts.drafted),
            num_accepted_by_place=tuple(self._drafts.accepted),
            workers=tuple(
                WorkerLoad(lane.info.name, len(lane.running), len(lane.in_flight), lane.is_draining) for lane in lanes
            ),
        )

    def has_requests(self) -> bool:
        """Tell whether any request is live; ``load`` would tell it too, at the cost of half a step."""
        return bool(self._book.request_by_id)

    def is_idle(self) -> bool:
        """Tell whether nothing is live, in flight, or to be said to anyone."""
        lanes = self._lane_by_worker.values()
        return self._book.is_empty() and self._kv.is_idle and all(lane.is_empty for lane in lanes)

    def check_invariants(self) -> None:
        """Check every law of :mod:`invariants`, in time proportional to all live requests.

        Raises:
            InvariantError: a law is broken.
        """
        check_scheduler_state(self._book, self._lane_by_worker, self._limits)

    def _is_filling(self, lane: Lane) -> bool:
        begins_at_ms = lane.begins_at_ms(self._limits)
        return begins_at_ms is not None and self._book.now_ms < begins_at_ms

    def _take_token(self, request: Request, num_computed_tokens: int, token_id: int) -> None:
        request.num_computed_tokens += num_computed_tokens
        if request.num_computed_tokens >= request.commit_at:
            self._kv.note_computed(request)
        self._append_output(request, token_id)

    def _is_held_back(self, request: Request) -> bool:
        ledger = self._book.ledger
        if not self._policy.has_tenants or ledger.is_alone(self._book.now_ms):
            return False
        num_places = sum(max_places(lane, self._limits) for lane in self._lane_by_worker.values())
        return ledger.has_its_places(request.account, num_places)

    def _append_output(self, request: Request, token_id: int) -> None:
        request.token_ids.append(token_id)
        request.account.num_charged_tokens += 1
        self._book.report(request)
        # Looked at before asking for the reason, since nearly every token ends nothing.
        if token_id in request.end_token_ids or len(request.token_ids) >= request.max_known_tokens:
            reason = natural_end(request)
            if reason is not None:
                self._end(request, reason)

    def _fail(self, request: Request, reason: str) -> None:
        self._end(request, FinishReason.ERROR, EngineError(ErrorReason.STEP_FAILED, reason))

    def _end(self, request: Request, reason: FinishReason, error: EngineError | None = None) -> None:
        """End a live request wherever it stands, and free everything that it holds."""
        if request.status is RequestStatus.RUNNING:
            self._kv.leave(request, RequestStatus.FINISHED)
        elif request.status is RequestStatus.ADMITTING:
            self._kv.abandon_admission(request)
        else:
            assert is_waiting(request)
            self._book.remove(request)
            request.change_status(RequestStatus.FINISHED)
        self._book.forget(request, make_finish(request, reason, error))
