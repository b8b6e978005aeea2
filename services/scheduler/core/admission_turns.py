"""Whose turn it is to be admitted, and where: what the broker asks blocks for in the next message.

Decides by the policy, the places of the lanes and the holds on them; asks for nothing itself. Its one caller is the
broker, which carries each choice out before the next one is made.
"""

from collections.abc import Callable, Iterator, Mapping

from services.scheduler.core.lane import Lane
from services.scheduler.core.lane_holds import AskTerms
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.placement import (
    can_run_on,
    choose_lane,
    has_place,
    max_places,
    num_reserved_places,
    open_lanes,
    why_no_lane,
)
from services.scheduler.core.policies.protocol import Policy
from services.scheduler.core.preemption import find_borrowers, find_displaceable_in
from services.scheduler.core.request import Request
from services.scheduler.core.request_book import RequestBook, is_waiting
from services.scheduler.core.timeline_events import BlockedCause


class _PassedOver:
    """Whose requests are asked for no more in the present message."""

    def __init__(self) -> None:
        self._tenants: set[str] = set()
        self._tenants_of_models: set[tuple[str, str]] = set()
        self._exempt_by_model: dict[str, frozenset[str]] = {}

    def __call__(self, model: str, tenant: str) -> bool:
        """Tell whether requests of ``tenant`` for ``model`` are passed over."""
        if tenant in self._tenants or (model, tenant) in self._tenants_of_models:
            return True
        exempt = self._exempt_by_model.get(model)
        return exempt is not None and tenant not in exempt

    def add_tenant(self, tenant: str) -> None:
        """Pass over a tenant."""
        self._tenants.add(tenant)

    def add_tenant_of_model(self, tenant: str, model: str) -> None:
        """Pass over a tenant where it asks for ``model``."""
        self._tenants_of_models.add((model, tenant))

    def add_model(self, model: str, exempt_tenants: frozenset[str]) -> None:
        """Pass over whoever asks for ``model``, but for some."""
        self._exempt_by_model[model] = exempt_tenants & self._exempt_by_model.get(model, exempt_tenants)


class AdmissionTurns:
    """Chooses among the waiting.

    Args:
        limits: Places per lane.
        policy: Who goes first, and who gives way to whom.
        book: Where waiting requests are found.
        lane_by_worker: The open lanes.
        take_place: Preempts the first request in favour of the second, which waits.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        book: RequestBook,
        lane_by_worker: Mapping[str, Lane],
        take_place: Callable[[Request, Request], None],
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._book = book
        self._lane_by_worker = lane_by_worker
        self._take_place = take_place

    def choose(self) -> Iterator[tuple[Request, Lane]]:
        """Yield whom the policy puts first, while a lane has a place or one can be made.

        The caller takes each request out of the queue before it asks for the next. Requests for which others were
        preempted as they reclaimed what is reserved to their tenants go before all others: else those that gave way
        would take the place, if not the blocks, again.

        While several tenants contend, those that have their share of the places leave a few free, so that one that has
        less finds a place at once, and does not wait for a long answer to end; and it takes places within its share
        back from those that have more than theirs. Classes come first all the same: nobody
        of a lower class goes before one that is held back for that.
        """
        if not len(self._book.queue):
            return  # as at nearly every step; reclaimers wait too
        lanes = self._lane_by_worker.values()
        yield from self._choose_reclaimers()
        passed_over = _PassedOver()
        held_level: int | None = None
        num_places = sum(max_places(lane, self._limits) for lane in lanes)
        has_reserve = self._policy.has_tenants and not self._book.ledger.is_alone(self._book.now_ms)
        while (request := self._book.peek(passed_over)) is not None:
            if held_level not in (None, self._policy.level_of(request)):
                break
            keeps_reserve = has_reserve and self._book.ledger.has_its_places(request.account, num_places)
            candidates = open_lanes(lanes, request, self._limits, keeps_reserve=keeps_reserve)
            lane = choose_lane(candidates, lanes, request) or self._make_place(request, keeps_reserve=keeps_reserve)
            if lane is None and has_reserve:
                lane = self._claim_place(request, num_places)
            if lane is not None:
                yield request, lane
            elif keeps_reserve and self._may_others_have_a_place(request, num_places):
                passed_over.add_tenant(request.submission.tenant)
                request.timeline.note_blocked(self._book.now_ms, BlockedCause.NO_PLACE)
                # Not that of this request, which an aged one of a lower class may be.
                held_level = self._book.queue.level_of_tenant(request.submission.tenant)
            else:
                self._pass_over(request, passed_over)
                cause = why_no_lane(lanes, request, self._limits)
                request.timeline.note_blocked(self._book.now_ms, cause)

    def _choose_reclaimers(self) -> Iterator[tuple[Request, Lane]]:
        for lane in self._lane_by_worker.values():
            reclaimers, lane.reclaimers = lane.reclaimers, []
            for request in reclaimers:
                is_held = lane.terms_for(request.submission.tenant) is AskTerms.HELD
                if is_waiting(request) and not is_held and has_place(lane, self._limits):
                    yield request, lane

    def _pass_over(self, request: Request, passed_over: _PassedOver) -> None:
        """Pass over all that cannot be admitted either, since ``request``, which goes before them, cannot be."""
        model, tenant = request.submission.model, request.submission.tenant
        roomy = [
            lane
            for lane in self._lane_by_worker.values()
            if not lane.is_draining and has_place(lane, self._limits) and can_run_on(lane, request)
        ]
        if any(lane.holds.is_limited(tenant) and not lane.holds.is_exhausted for lane in roomy):
            passed_over.add_tenant_of_model(tenant, model)
        else:
            owners = frozenset[str]().union(*(lane.holds.askable_owners() for lane in roomy))
            passed_over.add_model(model, owners - {tenant})

    def _may_others_have_a_place(self, request: Request, num_places: int) -> bool:
        """Tell whether those who have less than their share need not wait for ``request``, which has its own.

        There is a place for them that is kept free, or one on loan to be claimed back.
        """
        lanes = self._lane_by_worker.values()
        if open_lanes(lanes, request, self._limits, keeps_reserve=False):
            return True
        is_full = why_no_lane(lanes, request, self._limits) is BlockedCause.NO_PLACE
        return is_full and self._book.ledger.is_lending(num_places)

    def _claim_place(self, request: Request, num_places: int) -> Lane | None:
        """Preempt one request that has a place on loan from the tenant of ``request``; return its lane, if any."""
        ledger, num_step_tokens = self._book.ledger, self._limits.max_num_batched_tokens
        for lane in self._lane_by_worker.values():
            if not has_place(lane, self._limits) and not lane.is_draining and can_run_on(lane, request):
                borrowers = find_borrowers(lane, request, self._policy, ledger, num_places, num_step_tokens)
                if borrowers:
                    self._take_place(borrowers[0], request)
                    return lane
        return None

    def _make_place(self, request: Request, *, keeps_reserve: bool) -> Lane | None:
        """Preempt one request whose place ``request`` may take; return the lane where it was, None if there is none."""
        for lane in self._lane_by_worker.values():
            num_reserved = num_reserved_places(lane, self._limits) if keeps_reserve else 0
            is_full = not has_place(lane, self._limits, num_reserved)
            is_held = lane.terms_for(request.submission.tenant) is AskTerms.HELD
            if (is_full or is_held) and not lane.is_draining and can_run_on(lane, request):
                displaceable = find_displaceable_in(lane, request, self._policy, is_for_blocks=not is_full)
                if displaceable:
                    self._take_place(displaceable[0], request)
                    return lane
        return None
