"""A lane: one worker as the scheduler sees it, from its opening to its closing.

Owns the running requests of the worker in order of admission, the steps in flight, and the handles that the worker is
to forget. A worker that comes back gets a new lane, so nothing of the old one can be mistaken for news.
"""

from collections import deque
from dataclasses import dataclass, field

from services.common.verify import require
from services.scheduler.core.batch_plan import BatchPlan
from services.scheduler.core.kv_messages import BlockCopy, PoolSpec
from services.scheduler.core.lane_holds import AskTerms, LaneHolds
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.planned_step import PlannedStep
from services.scheduler.core.prefix_map import PrefixMap
from services.scheduler.core.request import Request
from services.scheduler.core.step_time import StepTimeModel


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Facts of a worker.

    ``num_blocks`` counts the null block; ``max_model_len`` bounds prompt and output together; ``num_host_blocks`` is
    the size of the host tier as it is to be used, see :mod:`host_tier`; ``max_draft_tokens`` is how many tokens it can
    guess for a row, 0 for a worker that does not guess.
    """

    name: str
    epoch: int
    num_blocks: int
    block_size: int
    max_model_len: int
    model: str
    weight_version: str
    num_host_blocks: int = 0
    max_draft_tokens: int = 0

    @property
    def num_usable_slots(self) -> int:
        """Token slots that one request could hold at most."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def pool_spec(self) -> PoolSpec:
        """The pool that the KV-cache manager is to keep for this worker."""
        return PoolSpec(
            pool=self.name,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            model=self.model,
            weight_version=self.weight_version,
            num_host_blocks=self.num_host_blocks,
            worker_epoch=self.epoch,
        )


@dataclass(slots=True, eq=False)
class Lane:
    """State of one worker.

    Attributes:
        info: Facts of the worker.
        credit_tokens: As in the limits, and what a row may draft besides.
        last_plan_id: Of the newest plan; the first lane of a worker starts from 0.
        prefixes: Beginnings of prompts that were admitted here.
        step_time: How long steps take here.
        is_draining: Whether the worker gets nothing new.
        holds: Whose admissions are held back for want of blocks.
        reclaimers: Waiting requests for which others were preempted, so that they are asked for before all others.
        running: Admitted requests by handle, in order of admission.
        admitting: Requests whose admission was asked for, by handle; they count as taken places.
        in_flight: Steps without result, oldest first.
        finished_handles: What the next plan tells the worker to forget.
        block_copies: What the next plan tells the worker to copy between device and host memory, in order.
    """

    info: WorkerInfo
    credit_tokens: int
    last_plan_id: int
    prefixes: PrefixMap
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    is_draining: bool = False
    holds: LaneHolds = field(default_factory=LaneHolds)
    reclaimers: list[Request] = field(default_factory=list)
    running: dict[int, Request] = field(default_factory=dict)
    admitting: dict[int, Request] = field(default_factory=dict)
    in_flight: deque[PlannedStep] = field(default_factory=deque)
    finished_handles: list[int] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)

    @property
    def has_errands(self) -> bool:
        """Whether the worker is to be told something even if it has nothing to compute."""
        return bool(self.finished_handles or self.block_copies)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs here, nothing will, and the worker has answered and been told everything."""
        return not (self.running or self.admitting or self.in_flight or self.has_errands)

    @property
    def num_places_taken(self) -> int:
        """Requests that run here or will if they are granted their blocks."""
        return len(self.running) + len(self.admitting)

    def terms_for(self, tenant: str) -> AskTerms:
        """Say on what terms it makes sense to ask blocks for a request of ``tenant``.

        When nothing runs, nothing would ever lift a hold: ask then.
        """
        if self.is_draining:
            return AskTerms.HELD
        return self.holds.terms_for(tenant) if self.running else AskTerms.FREE

    def begins_at_ms(self, limits: SchedulerLimits) -> int | None:
        """Return until when the lane, which has not begun yet, waits for more requests; None when it need not.

        It waits for as long as the first of them has waited less than ``batch_wait_ms`` and there is a place left.
        """
        if self.in_flight or not self.running or self.num_places_taken >= limits.max_num_requests:
            return None
        if any(request.is_known_to_worker for request in self.running.values()):
            return None
        return min(request.arrival_ms for request in self.running.values()) + limits.batch_wait_ms

    def put_in_flight(self, step: PlannedStep) -> BatchPlan:
        """Await the result of a step, and return its plan, which brings all errands along."""
        step.plan_id = self.last_plan_id = self.last_plan_id + 1
        block_copies: tuple[BlockCopy, ...] = ()
        if self.finished_handles or self.block_copies:
            step.finished_handles, self.finished_handles = tuple(self.finished_handles), []
            block_copies, self.block_copies = tuple(self.block_copies), []
        self.in_flight.append(step)
        rows, new_requests = tuple(step.rows), tuple(step.new_requests)
        return BatchPlan(step.plan_id, self.info.name, new_requests, rows, step.finished_handles, block_copies)

    @property
    def last_applied_plan_id(self) -> int:
        """Id of the newest plan whose result was taken up, or is being so."""
        return self.in_flight[0].plan_id - 1 if self.in_flight else self.last_plan_id

    def pop_in_flight(self, plan_id: int) -> PlannedStep | None:
        """Take out the step that a result or failure belongs to; None when it is none of this lane's.

        Raises:
            InvariantError: an older plan has no result yet, though a worker answers in order.
        """
        if not self.in_flight or plan_id < self.in_flight[0].plan_id:
            return None
        step = self.in_flight.popleft()
        if step.plan_id != plan_id:
            require(False, "results come in the order of plans", expected=step.plan_id, got=plan_id)
        return step

    def note_finished(self, request: Request) -> None:
        """Take note that a request that was taken out has ended, so that its blocks come free for others."""
        running_tenants = {each.submission.tenant for each in self.running.values()} if self.holds.has_limited else ()
        self.holds.note_finished(request.submission.tenant, running_tenants)

    def remove(self, request: Request) -> None:
        """Take a running request out, and remember to tell the worker if it knows the handle."""
        del self.running[request.handle]
        if request.is_known_to_worker:
            self.finished_handles.append(request.handle)
