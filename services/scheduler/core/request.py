"""A request: its known tokens, how far they are computed, and the legal changes of its status.

One rule drives everything: a step lets *computed* catch up with *known*. There is no prefill phase and no decode phase.
With run-ahead each of the two numbers has a confirmed and an expected value::

    0        num_computed_tokens   num_planned_tokens    len(token_ids)    num_expected_tokens   max_known_tokens
    |--------|---------------------|---------------------|-----------------|---------------------|
    KV is there; result applied    in plans in flight     to be planned      sampled in flight      never exceeded

A request can be planned while ``num_planned_tokens < num_expected_tokens < max_known_tokens``. The row samples iff it
reaches ``num_expected_tokens``, and then expects one token more. In steady decoding exactly one token is to be
planned: the one that the step before samples. Where the worker may guess tokens, planned and expected are the most
that may be, until a result says what came true.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from services.common.verify import require
from services.scheduler.core.batch_plan import NewRequest, ScheduledRow
from services.scheduler.core.kv_messages import AdmitGranted
from services.scheduler.core.submission import Submission
from services.scheduler.core.tenant_ledger import Account
from services.scheduler.core.timeline import Timeline

if TYPE_CHECKING:
    from services.scheduler.core.lane import Lane

NO_HANDLE = 0
"""The handle of a request that is not admitted; never given out."""

_NO_ROW = ScheduledRow(NO_HANDLE, 1, (), True)

NEVER = 1 << 62
"""A number of tokens that no request reaches."""


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    ADMITTING = "admitting"  # its Admit is under way to the KV-cache manager
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, after it ran
    FINISHED = "finished"


_S = RequestStatus
_LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.ADMITTING, _S.FINISHED}),
    _S.ADMITTING: frozenset({_S.RUNNING, _S.WAITING, _S.PREEMPTED, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.ADMITTING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """State of one live request. Compared by identity.

    Attributes:
        submission: As it came.
        arrival: Position in the order of arrival; the request keeps it for life.
        arrival_ms: When it arrived, Unix time.
        account: Of its tenant.
        timeline: What happened to it.
        token_ids: All confirmed tokens, prompt and output.
        end_token_ids: Those that end the output.
        max_known_tokens: Length at which the output is cut; depends on the worker, so it is final once admitted.
        num_reported_tokens: Of ``token_ids``, how many the gateway has been told.
        num_cached_tokens: Hit of the first admission; None before.
        prefix_hashes: Of the beginnings of the prompt, for placement; None before they were needed.
        num_preemptions: How often it had to give way to another request.
        has_taken_place: Whether another one gave way to it, and it has not been granted blocks yet.
        max_length: Length at which the output is cut, since its tenant may not hold more; NEVER as far as is known.
        misfit_pools: Where its tenant may not hold as much as it may grow to, as far as is known.
        handle: Of the present admission.
        lane: Where it is admitted.
        block_epoch: Of the pool's opening that the block table belongs to.
        block_ids: The block table.
        num_slots: Positions that the block table has room for.
        num_told_tokens: Of ``token_ids``, how many the KV-cache manager knows.
        commit_at: Number of computed tokens at which another block is full.
        refill_at: Number of expected tokens at which the credit of slots runs low; NEVER while a refill is under way or
            the table is complete.
        is_known_to_worker: Whether a plan has introduced the present handle.
        is_steady: Whether it is known and the worker knows all its blocks, so that decoding takes just ``steady_row``.
        steady_row: The row of one token that samples and brings no block; the same at every step of an admission.
        num_sent_blocks: Of ``block_ids``, how many the worker has been told.
        num_draft_tokens: How many tokens were guessed for it.
        num_accepted_tokens: How many of them came true.
    """

    submission: Submission
    arrival: int
    arrival_ms: int
    account: Account
    timeline: Timeline
    token_ids: list[int]
    end_token_ids: frozenset[int]
    max_known_tokens: int
    num_reported_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_cached_tokens: int | None = None
    prefix_hashes: list[int] | None = None
    num_preemptions: int = 0
    has_taken_place: bool = False
    max_length: int = NEVER
    misfit_pools: frozenset[str] = frozenset()
    handle: int = NO_HANDLE
    lane: "Lane | None" = None
    block_epoch: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_slots: int = 0
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    num_expected_tokens: int = 0
    num_told_tokens: int = 0
    commit_at: int = NEVER
    refill_at: int = NEVER
    is_known_to_worker: bool = False
    is_steady: bool = False
    steady_row: ScheduledRow = _NO_ROW
    num_sent_blocks: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def from_submission(cls, submission: Submission, arrival: int, arrival_ms: int, account: Account) -> "Request":
        """Build a waiting request; its first event will begin after the tokens that the client has already."""
        token_ids = [*submission.prompt_token_ids, *submission.output_token_ids]
        return cls(
            submission=submission,
            arrival=arrival,
            arrival_ms=arrival_ms,
            account=account,
            timeline=Timeline(submission),
            token_ids=token_ids,
            end_token_ids=frozenset(submission.eos_token_ids).union(submission.stop_token_ids),
            max_known_tokens=len(submission.prompt_token_ids) + submission.max_tokens,
            num_reported_tokens=len(token_ids),
        )

    @property
    def has_run(self) -> bool:
        """Whether it was admitted before."""
        return self.num_cached_tokens is not None

    @property
    def request_id(self) -> str:
        """Id that the client knows."""
        return self.submission.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt proper, without outputs that came with a resumption."""
        return len(self.submission.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    def change_status(self, status: RequestStatus) -> None:
        """Move to ``status``.

        Raises:
            InvariantError: the transition is not legal.
        """
        is_legal = status in _LEGAL_TRANSITIONS[self.status]
        require(is_legal, "a request's status changes legally", request_id=self.request_id, old=self.status, new=status)
        self.status = status

    def cut_to(self, num_slots: int) -> bool:
        """Let the output end when ``num_slots`` are full, if the client named no limit; False if that is no help."""
        max_length = num_slots + 1  # the last token of all is never computed
        is_cut = self.submission.is_max_tokens_implied and len(self.token_ids) < max_length < self.max_known_tokens
        if is_cut:
            self.max_length = max_length
        return is_cut

    def begin_running(self, grant: AdmitGranted) -> None:
        """Take up a granted lease: everything from the end of the hit is to be computed."""
        self.change_status(RequestStatus.RUNNING)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(grant.num_cached_tokens, self.num_prompt_tokens)
        self.steady_row = ScheduledRow(self.handle, 1, (), True)
        self.block_epoch = grant.block_epoch
        self.num_computed_tokens = self.num_planned_tokens = grant.num_cached_tokens
        self.num_expected_tokens = self.num_told_tokens = len(self.token_ids)
        self.add_blocks(grant.block_ids)
        self.advance_commit()

    def add_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Append granted blocks to the table and set the level at which the next are to be asked for."""
        assert self.lane is not None
        self.block_ids += block_ids
        self.is_steady = False
        self.num_slots = len(self.block_ids) * self.lane.info.block_size
        # The last token of all is never computed, so it needs no slot.
        is_complete = self.num_slots >= self.max_known_tokens - 1
        self.refill_at = NEVER if is_complete else self.num_slots - self.lane.credit_tokens + 1

    def advance_commit(self) -> None:
        """Set the level of computed tokens at which the next block is full."""
        assert self.lane is not None
        block_size = self.lane.info.block_size
        self.commit_at = (self.num_computed_tokens // block_size + 1) * block_size

    def introduce(self) -> NewRequest:
        """Build what the worker needs to begin with this request; to be sent in the plan of its first row."""
        self.is_known_to_worker = True
        self.num_sent_blocks = len(self.block_ids)
        return NewRequest(
            handle=self.handle,
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.submission.sampling,
            block_ids=tuple(self.block_ids),
            num_computed_tokens=self.num_computed_tokens,
            block_epoch=self.block_epoch,
        )

    def plan_row(self, num_tokens: int) -> ScheduledRow:
        """Plan the next ``num_tokens`` positions, which must have slots.

        The row samples if it reaches the end of what is expected, and then one token more is expected.
        """
        self.num_planned_tokens += num_tokens
        is_sampling = self.num_planned_tokens == self.num_expected_tokens
        if is_sampling:
            self.num_expected_tokens += 1
        new_block_ids: tuple[int, ...] = ()
        if self.num_sent_blocks != len(self.block_ids):
            new_block_ids = tuple(self.block_ids[self.num_sent_blocks :])
            self.num_sent_blocks = len(self.block_ids)
        self.is_steady = True
        return ScheduledRow(self.handle, num_tokens, new_block_ids, is_sampling)

    def grant_drafts(self, num_tokens: int) -> None:
        """Let the row that was planned last go on by so many guessed tokens, which must have slots."""
        self.num_planned_tokens += num_tokens
        self.num_expected_tokens += num_tokens

    def take_back_drafts(self, num_tokens: int) -> None:
        """Count so many granted tokens as not come true: later positions begin that much earlier."""
        self.num_planned_tokens -= num_tokens
        self.num_expected_tokens -= num_tokens

    def leave_lane(self, status: RequestStatus) -> None:
        """Forget the present admission. Known tokens stay; whatever is in flight for the old handle is void."""
        self.change_status(status)
        self.handle = NO_HANDLE
        self.lane = None
        self.block_ids = []
        self.num_slots = self.num_sent_blocks = 0
        self.num_computed_tokens = self.num_planned_tokens = self.num_expected_tokens = self.num_told_tokens = 0
        self.commit_at = self.refill_at = NEVER
        self.is_known_to_worker = self.is_steady = False
