"""Whose turn it is to be admitted, and where: what the broker asks blocks for in the next message.

Decides by the policy, the places of the lanes and the holds on them; asks for nothing itself. Its one caller is the
broker, which carries each choice out before the next one is made.
"""

from collections.abc import Callable, Iterator, Mapping

from services.scheduler.core.lane import Lane
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.placement import (
    can_run_on,
    choose_lane,
    max_places,
    num_reserved_places,
    open_lanes,
    why_no_lane,
)
from services.scheduler.core.policies.protocol import Policy
from services.scheduler.core.preemption import find_displaceable
from services.scheduler.core.request import Request
from services.scheduler.core.request_book import RequestBook
from services.scheduler.core.timeline_events import BlockedCause


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

        The caller takes each request out of the queue before it asks for the next.

        While several tenants contend, those that have their share of the places leave a few free, so that one that has
        less finds a place at once, and does not wait for a long answer to end. Classes come first all the same: nobody
        of a lower class goes before one that is held back for that.
        """
        lanes = self._lane_by_worker.values()
        closed_models: set[str] = set()
        held_tenants: set[str] = set()
        held_level: int | None = None
        num_places = sum(max_places(lane, self._limits) for lane in lanes)
        has_reserve = self._policy.has_tenants and not self._book.ledger.is_alone(self._book.now_ms)
        while (request := self._book.peek(closed_models, held_tenants)) is not None:
            if held_level not in (None, self._policy.level_of(request)):
                break
            keeps_reserve = has_reserve and self._book.ledger.has_its_places(request.account, num_places)
            candidates = open_lanes(lanes, request, self._limits, keeps_reserve=keeps_reserve)
            lane = choose_lane(candidates, lanes, request) or self._make_place(request, keeps_reserve=keeps_reserve)
            if lane is not None:
                yield request, lane
            elif keeps_reserve and open_lanes(lanes, request, self._limits, keeps_reserve=False):
                held_tenants.add(request.submission.tenant)
                request.timeline.note_blocked(self._book.now_ms, BlockedCause.NO_PLACE)
                held_level = self._policy.level_of(request)
            else:
                closed_models.add(request.submission.model)
                cause = why_no_lane(lanes, request, self._limits)
                request.timeline.note_blocked(self._book.now_ms, cause)

    def _make_place(self, request: Request, *, keeps_reserve: bool) -> Lane | None:
        """Preempt one request whose place ``request`` may take; return the lane where it was, None if there is none."""
        for lane in self._lane_by_worker.values():
            num_reserved = num_reserved_places(lane, self._limits) if keeps_reserve else 0
            is_full = lane.num_places_taken >= max_places(lane, self._limits) - num_reserved
            if (is_full or not lane.is_admitting_allowed) and not lane.is_draining and can_run_on(lane, request):
                displaceable = find_displaceable(request, lane.running.values(), self._policy)
                if displaceable:
                    self._take_place(displaceable[0], request)
                    return lane
        return None
