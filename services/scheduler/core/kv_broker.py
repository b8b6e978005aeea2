"""The broker: everything between the scheduler and the KV-cache manager, and thereby who enters and who leaves a lane.

Blocks decide who runs, so the ways in and out are here: a waiting request becomes a running one by a granted
``Admit``, and a running one leaves by a release, which this module never forgets. Messages go out one at a time;
between two messages everything is collected, so steady decoding costs a message about every ``block_size`` steps, and
no step waits for it.

Releasing a lease while a plan in flight still has a row for it is safe: a worker executes plans strictly in order, so
that dead row writes its slots before any row of the block's next owner can, and no committed block is among them, for
only positions of applied results are committed and a row in flight lies behind those.
"""

from services.common.verify import require
from services.scheduler.core.admission_turns import AdmissionTurns
from services.scheduler.core.kv_messages import (
    Admit,
    AdmitGranted,
    Commit,
    DenialReason,
    Denied,
    KVMessage,
    KVReply,
    Reserve,
    ReserveGranted,
)
from services.scheduler.core.kv_outbox import KVOutbox
from services.scheduler.core.lane import Lane
from services.scheduler.core.lane_holds import AdmissionHold, AskTerms
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.placement import can_run_on, max_known_tokens_on
from services.scheduler.core.policies.protocol import Policy
from services.scheduler.core.preemption import victims_for_running, victims_for_waiting
from services.scheduler.core.request import NEVER, Request, RequestStatus
from services.scheduler.core.request_book import RequestBook
from services.scheduler.core.timeline_events import BlockedCause, Peer, PreemptionCause


class KVBroker:
    """Asks for blocks, takes grants up, and gives blocks back.

    Args:
        limits: Places per lane, and the credit.
        first_handle: Handles count up from here; no two schedulers of one KV-cache manager may overlap.
        policy: Who gives way to whom.
        book: Where waiting requests are found and go back to.
        lane_by_worker: The open lanes, shared with the scheduler.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        first_handle: int,
        policy: Policy,
        book: RequestBook,
        lane_by_worker: dict[str, Lane],
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._next_handle = first_handle
        self._book = book
        self._lane_by_worker = lane_by_worker
        self._turns = AdmissionTurns(limits, policy, book, lane_by_worker, self._take_place)
        self._outbox = KVOutbox()
        self._uncommitted: dict[Request, None] = {}
        self._asking_lane_by_handle: dict[int, Lane] = {}
        self._reserving_by_handle: dict[int, Request] = {}
        self.num_preemptions = 0

    @property
    def outbox(self) -> KVOutbox:
        """What is not said or not answered yet; to be looked at only."""
        return self._outbox

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be said and no answer is awaited."""
        return self._outbox.is_empty and not self._outbox.is_awaiting_reply and not self._uncommitted

    def open_lane(self, lane: Lane) -> None:
        """Have the pool of a new lane opened."""
        self._outbox.open_pool(lane.info.pool_spec)

    def close_lane(self, lane: Lane) -> None:
        """Return all of a lane's requests to the queue and have its pool closed."""
        self._outbox.close_pool(lane.info.name)
        self._empty_lane(lane, PreemptionCause.WORKER_LOST)

    def reset(self) -> None:
        """Begin anew with a KV-cache manager that knows nothing; its predecessor's answers are void."""
        self._outbox.reset()
        for lane in self._lane_by_worker.values():
            self._empty_lane(lane, PreemptionCause.KV_CACHE_LOST)
            lane.holds.set_owners(())
            lane.reclaimers.clear()
            lane.block_copies.clear()
            lane.prefixes.clear()
            self.open_lane(lane)

    def note_computed(self, request: Request) -> None:
        """Remember that a block of ``request`` became full; it is committed in the next message."""
        self._uncommitted[request] = None
        request.advance_commit()

    def ask_blocks(self, request: Request) -> None:
        """Refill the credit of a running request; not asked twice, since its refill level is NEVER until the answer."""
        assert request.lane is not None
        block_size = request.lane.info.block_size
        # Never more slots than the request can use: its last token is not computed.
        num_slots_wanted = min(request.num_expected_tokens + request.lane.credit_tokens, request.max_known_tokens - 1)
        num_blocks = -(-(num_slots_wanted - request.num_slots) // block_size)
        request.refill_at = NEVER
        self._reserving_by_handle[request.handle] = request
        self._outbox.reserve(request.lane.info.name, Reserve(request.handle, num_blocks))

    def leave(self, request: Request, status: RequestStatus) -> None:
        """Take a running request out of its lane for ``status``, which is FINISHED or PREEMPTED.

        What it has computed is committed, its lease is released, and its worker is told to forget it.
        """
        lane, handle = request.lane, request.handle
        assert lane is not None
        self._commit_if_due(request)
        request.timeline.note_left(self._book.now_ms, lane.last_applied_plan_id, request.num_computed_tokens)
        self._outbox.release(lane.info.name, handle)
        self._reserving_by_handle.pop(handle, None)
        lane.remove(request)
        if status is RequestStatus.FINISHED:
            lane.note_finished(request)
        self._leave_lane(request, status)

    def abandon_admission(self, request: Request) -> None:
        """Let a request end whose Admit is under way; should it be granted, the lease is released at once."""
        self._book.refund(request)
        self._leave_lane(request, RequestStatus.FINISHED)

    def take_message(self) -> KVMessage | None:
        """Build the next message; None while an answer is awaited, or when there is nothing to say."""
        if self._outbox.is_awaiting_reply:
            return None
        if self._outbox.is_empty and not self._uncommitted and not len(self._book.queue):
            return None  # as at nearly every step
        while self._uncommitted:
            self._commit_if_due(next(iter(self._uncommitted)))
        return self._outbox.take_message([self._ask_admission(request, lane) for request, lane in self._turns.choose()])

    def apply_reply(self, reply: KVReply) -> list[Request]:
        """Take grants up, and find blocks elsewhere for what was denied.

        Returns:
            Requests whose tenant may never hold as much as they need, wherever they run; to be ended.
        """
        if not self._outbox.accept_reply(reply.sequence):
            return []
        for pool, owners in reply.pool_owners:
            self._note_quotas(pool, owners)
        for pool, copies in reply.block_copies:
            lane = self._lane_by_worker.get(pool)
            if lane is not None and not self._outbox.is_opening(pool):
                lane.block_copies += copies
        for grant in reply.admitted:
            self._start(grant)
        for refill in reply.reserved:
            self._add_blocks(refill)
        misfits: list[Request] = []
        for denied in reply.denied:
            lane = self._asking_lane_by_handle.pop(denied.handle, None)
            misfit = self._find_blocks(denied) if lane is None else self._return_to_queue(lane, denied)
            if misfit is not None:
                misfits.append(misfit)
        is_complete = not self._asking_lane_by_handle
        require(is_complete, "every admit is answered", unanswered=len(self._asking_lane_by_handle))
        return misfits

    def _note_quotas(self, pool: str, owners: tuple[str, ...]) -> None:
        """Take note that other quotas are in force, so that whatever was denied may be granted now."""
        lane = self._lane_by_worker.get(pool)
        if lane is not None and not self._outbox.is_opening(pool):
            lane.holds.set_owners(owners)
            for request in self._book.queue:
                request.misfit_pools -= {pool}
                request.max_length = NEVER

    def _ask_admission(self, request: Request, lane: Lane) -> Admit:
        self._book.choose(request)
        request.change_status(RequestStatus.ADMITTING)
        self._book.ledger.take_place(request.account)
        request.lane, request.handle = lane, self._next_handle
        request.max_known_tokens = min(max_known_tokens_on(lane.info, request.submission), request.max_length)
        self._next_handle += 1
        lane.admitting[request.handle] = request
        self._asking_lane_by_handle[request.handle] = lane
        return Admit(
            handle=request.handle,
            pool=lane.info.name,
            cache_scope=request.submission.cache_scope,
            token_ids=tuple(request.token_ids),
            num_tokens=min(len(request.token_ids) + lane.credit_tokens, request.max_known_tokens - 1),
            request_id=request.request_id,
            tenant=request.submission.tenant,
            max_num_tokens=request.max_known_tokens - 1,
            is_reserved_only=lane.terms_for(request.submission.tenant) is AskTerms.RESERVED_ONLY,
        )

    def _start(self, grant: AdmitGranted) -> None:
        lane = self._asking_lane_by_handle.pop(grant.handle, None)
        if lane is None:
            return  # the lane was closed, and with its pool went the lease
        request = lane.admitting.pop(grant.handle)
        if request.handle != grant.handle:
            self._outbox.release(lane.info.name, grant.handle)  # the request has ended meanwhile
            return
        lane.running[grant.handle] = request
        request.has_taken_place = False
        is_first = not request.has_run
        request.begin_running(grant)
        self._book.num_admitted += 1
        request.timeline.note_admitted(
            self._book.now_ms,
            lane.info.name,
            next_step=lane.last_plan_id + 1,
            num_known=len(request.token_ids),
            num_cached=grant.num_cached_tokens,
            num_admitted=self._book.num_admitted - 1,
        )
        if is_first:
            assert request.num_cached_tokens is not None
            self._book.note_started(request, num_cached_tokens=request.num_cached_tokens)

    def _return_to_queue(self, lane: Lane, denied: Denied) -> Request | None:
        """Let a request wait again that was denied its blocks; return it if no pool would ever do."""
        request, pool = lane.admitting.pop(denied.handle), lane.info.name
        if request.handle != denied.handle:
            return None  # it has ended meanwhile; what it could not have, others may
        self._requeue(request)
        tenant = request.submission.tenant
        if denied.reason is DenialReason.NEVER_FITS:
            if request.cut_to(denied.num_free_blocks * lane.info.block_size):
                return None
            request.misfit_pools |= {pool}
            can_wait = any(can_run_on(each, request) for each in self._lane_by_worker.values())
            return None if can_wait else request
        is_limit = denied.reason is DenialReason.TENANT_LIMIT
        # Who gave way to it would be back as soon as a prompt is committed, and give way to it again.
        is_in_vain = request.has_taken_place and bool(lane.running)
        request.has_taken_place = False
        until = AdmissionHold.UNTIL_FINISH if is_in_vain else AdmissionHold.UNTIL_NEWS
        if not self._outbox.has_releases(pool):  # else what comes free may do already
            if is_limit:
                lane.holds.hold_tenant(until, tenant)
            else:
                lane.holds.hold_all(until, tenant)
        cause = BlockedCause.TENANT_LIMIT if is_limit else BlockedCause.NO_BLOCKS
        needed, free = denied.num_blocks_needed, denied.num_free_blocks
        request.timeline.note_blocked(self._book.now_ms, cause, needed, free)
        self._make_room(request, lane, denied)
        return None

    def _make_room(self, request: Request, lane: Lane, denied: Denied) -> None:
        """Preempt those who are to give way to a waiting request, which is not to be held back then."""
        victims, cause = victims_for_waiting(lane, request, denied, self._policy)
        has_releases = self._outbox.has_releases(lane.info.name)
        if denied.reclaim_handles and (victims or has_releases):
            lane.reclaimers.append(request)
            victims = [] if has_releases else victims  # else what comes free may do already
        for victim in victims:
            self._displace(victim, request, cause)

    def _add_blocks(self, grant: ReserveGranted) -> None:
        request = self._reserving_by_handle.pop(grant.handle, None)
        if request is not None:
            assert request.lane is not None
            # Where tokens are guessed, what is planned is only the most that may be, and says nothing of steps.
            if request.num_planned_tokens == request.num_slots and not request.lane.info.max_draft_tokens:
                next_step = request.lane.last_plan_id + 1
                request.timeline.note_refilled(self._book.now_ms, next_step, request.num_planned_tokens)
            request.add_blocks(grant.block_ids)
            if request.num_expected_tokens >= request.refill_at:
                self.ask_blocks(request)

    def _find_blocks(self, denied: Denied) -> Request | None:
        """Make room for a running request whose refill was denied, at the cost of another, or itself, if need be.

        Returns:
            The request, if it has grown to what its tenant may hold by now.
        """
        request = self._reserving_by_handle.get(denied.handle)
        if request is None:
            return None
        if denied.reason is DenialReason.NEVER_FITS:
            return request
        assert request.lane is not None
        if not self._outbox.has_releases(request.lane.info.name):
            self._preempt_for_running(request, request.lane, denied)
        if request.handle == denied.handle:
            self.ask_blocks(request)
        return None

    def _preempt_for_running(self, request: Request, lane: Lane, denied: Denied) -> None:
        victims, cause = victims_for_running(lane, request, denied, self._policy)
        for victim in victims:
            self._preempt(victim, request, cause)
            if cause is PreemptionCause.TENANT_LIMIT:
                lane.holds.hold_tenant(AdmissionHold.UNTIL_FINISH, request.submission.tenant)
            else:
                lane.holds.hold_all(AdmissionHold.UNTIL_FINISH, victim.submission.tenant)

    def _preempt(self, victim: Request, by: Request, cause: PreemptionCause) -> None:
        self.num_preemptions += 1
        victim.num_preemptions += 1
        num_lost_tokens = victim.num_computed_tokens
        self.leave(victim, RequestStatus.PREEMPTED)
        self._note_preempted(victim, cause, by.timeline.peer, num_lost_tokens)
        self._book.return_preempted(victim)

    def _take_place(self, victim: Request, by: Request) -> None:
        self._displace(victim, by, PreemptionCause.PLACE_TAKEN)
        by.has_taken_place = True

    def _displace(self, victim: Request, by: Request, cause: PreemptionCause) -> None:
        """Preempt ``victim`` in favour of the waiting request ``by``, which therefore is not to be held back."""
        lane = victim.lane
        assert lane is not None
        self._preempt(victim, by, cause)
        lane.holds.lift()
        lane.holds.lift_tenant(by.submission.tenant)

    def _note_preempted(self, victim: Request, cause: PreemptionCause, by: Peer | None, num_lost_tokens: int) -> None:
        book = self._book
        victim.timeline.note_preempted(book.now_ms, cause, by, num_lost_tokens, book.num_admitted)

    def _commit_if_due(self, request: Request) -> None:
        if request not in self._uncommitted:
            return
        del self._uncommitted[request]
        lane = request.lane
        assert lane is not None
        token_ids = tuple(request.token_ids[request.num_told_tokens :])
        is_catching_up = request.num_computed_tokens <= request.num_told_tokens
        request.num_told_tokens = len(request.token_ids)
        self._outbox.commit(lane.info.name, Commit(request.handle, request.num_computed_tokens, token_ids))
        if is_catching_up:
            lane.holds.note_shared(request.submission.tenant)

    def _empty_lane(self, lane: Lane, cause: PreemptionCause) -> None:
        """Return the requests of a lane whose leases are gone to the queue."""
        for request in list(lane.running.values()):
            self._uncommitted.pop(request, None)
            self._reserving_by_handle.pop(request.handle, None)
            lane.remove(request)
            self.num_preemptions += 1
            num_lost_tokens = request.num_computed_tokens
            request.timeline.note_left(self._book.now_ms, lane.last_applied_plan_id, num_lost_tokens)
            self._note_preempted(request, cause, None, num_lost_tokens)
            self._leave_lane(request, RequestStatus.PREEMPTED)
            self._book.return_preempted(request)
        for handle, request in lane.admitting.items():
            del self._asking_lane_by_handle[handle]
            if request.handle == handle:
                self._requeue(request)
        lane.admitting.clear()

    def _leave_lane(self, request: Request, status: RequestStatus) -> None:
        self._book.ledger.leave_place(request.account)
        request.leave_lane(status)

    def _requeue(self, request: Request) -> None:
        self._leave_lane(request, RequestStatus.PREEMPTED if request.has_run else RequestStatus.WAITING)
        self._book.return_denied(request)
