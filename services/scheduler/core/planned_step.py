"""A step of one worker as the scheduler knows it, from the choice of its rows until its result is taken up.

What the worker is told of it is a :class:`BatchPlan`; this is what the result is held against. A row whose handle is
not among the running requests of the lane any more is dead: its request has ended, or runs elsewhere or later.
"""

from collections.abc import Mapping

from services.scheduler.core.batch_plan import NewRequest, ScheduledRow
from services.scheduler.core.request import Request


class PlannedStep:
    """The rows of a step, and what is to be done because of them.

    Written out instead of a dataclass: one is made for every step, and default factories cost more than the rest of it.

    Attributes:
        rows: Of running requests, at most one of each.
        new_requests: Introductions of those that are new to the worker.
        low_on_slots: Those whose credit of slots is to be refilled.
        num_tokens: Sum over the rows.
        num_decodes: Rows at the beginning that are one token each; the others catch up.
        num_draft_tokens: What rows may draft besides; ``num_tokens`` includes it.
        has_chunks: Whether some row catches up.
        plan_id: Of its plan; 0 before it is in flight.
        finished_handles: Those that the worker forgets with it.
    """

    __slots__ = (
        "finished_handles",
        "has_chunks",
        "low_on_slots",
        "new_requests",
        "num_decodes",
        "num_draft_tokens",
        "num_tokens",
        "plan_id",
        "rows",
    )

    def __init__(self) -> None:
        self.rows: list[ScheduledRow] = []
        self.new_requests: list[NewRequest] = []
        self.low_on_slots: list[Request] = []
        self.num_tokens = self.num_decodes = self.num_draft_tokens = 0
        self.has_chunks = False
        self.plan_id = 0
        self.finished_handles: tuple[int, ...] = ()

    def add(self, request: Request, num_tokens: int) -> None:
        """Add a row for the next ``num_tokens`` positions of ``request``."""
        if not request.is_known_to_worker:
            self.new_requests.append(request.introduce())
        self.rows.append(request.plan_row(num_tokens))
        self.num_tokens += num_tokens
        if request.num_expected_tokens >= request.refill_at:
            self.low_on_slots.append(request)

    def note_step(self, running: Mapping[int, Request]) -> None:
        """Write into the timelines that the result is there, for rows that compute any number of tokens."""
        for row in self.rows:
            request = running.get(row.handle)
            if request is not None:
                request.timeline.note_step(self.plan_id)

    def note_chunks_planned(self, running: Mapping[int, Request], now_ms: int) -> None:
        """Write the rows that catch up into the timelines."""
        for row in self.rows[self.num_decodes :]:
            request = running[row.handle]
            num_planned_tokens = request.num_planned_tokens
            request.timeline.note_chunk(now_ms, self.plan_id, row.num_scheduled_tokens, num_planned_tokens)

    def note_chunks_computed(self, running: Mapping[int, Request], now_ms: int) -> None:
        """Write into the timelines that those rows' results are there."""
        for row in self.rows[self.num_decodes :]:
            request = running.get(row.handle)
            if request is not None:
                request.timeline.note_chunk_computed(now_ms, self.plan_id)
