"""What can happen to a request between its arrival and its end, as it is told to those who ask why it took so long.

Times are Unix times in ms, as the shell last told them. A step is named by the ``plan_id`` of its worker.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from services.common.errors import ErrorReason
from services.scheduler.core.events import FinishReason
from services.scheduler.core.submission import PriorityClass


class BlockedCause(Enum):
    """Why the request that goes next could not begin."""

    NO_WORKER = "no_worker"  # none that has its model and room for it takes requests
    NO_PLACE = "no_place"  # as many requests run as may
    NO_BLOCKS = "no_blocks"  # the block pool has too few
    TENANT_LIMIT = "tenant_limit"  # its tenant holds as many blocks as it may


class PreemptionCause(Enum):
    """Why a running request had to wait again."""

    OUT_OF_BLOCKS = "out_of_blocks"  # a running request needed a block, and the pool had none
    PLACE_TAKEN = "place_taken"  # a waiting request of a higher class took its place
    BLOCKS_TAKEN = "blocks_taken"  # a waiting request of a higher class took its blocks
    BURST_RECLAIMED = "burst_reclaimed"  # beyond its tenant's reservation, it held blocks that another's needed
    TENANT_LIMIT = "tenant_limit"  # a running request of its tenant needed a block, and the tenant was at its limit
    WORKER_LOST = "worker_lost"
    KV_CACHE_LOST = "kv_cache_lost"


class RunKind(Enum):
    """What a run of steps did for a request."""

    CATCH_UP = "catch_up"  # computed known tokens: the prompt, and after a preemption the output too
    DECODE = "decode"  # one token a step, each sampled


class Peer(NamedTuple):
    """Another request. Its id and tenant are empty when they are not for the reader's eyes."""

    request_id: str
    tenant: str
    priority: PriorityClass


@dataclass(frozen=True, slots=True)
class Queued:
    """It arrived, and ``num_waiting`` requests waited; ``behind`` was to go next, None when it was itself."""

    at_ms: int
    num_waiting: int
    num_running: int
    behind: Peer | None


@dataclass(frozen=True, slots=True)
class Blocked:
    """It was the next to go, and could not, ``num_times`` in a row until ``until_ms``.

    ``num_blocks_needed`` and ``num_blocks_free`` are what the KV-cache manager said last; 0 when it was not asked.
    """

    at_ms: int
    until_ms: int
    cause: BlockedCause
    num_times: int
    num_blocks_needed: int = 0
    num_blocks_free: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """It got its blocks on ``worker``; of ``num_known_tokens`` the first ``num_cached_tokens`` were computed already.

    ``num_went_before``: requests admitted since it began to wait.
    """

    at_ms: int
    worker: str
    num_known_tokens: int
    num_cached_tokens: int
    num_went_before: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """It had a row in each step from ``first_step`` to ``last_step``, of ``num_tokens`` together."""

    at_ms: int
    until_ms: int
    worker: str
    kind: RunKind
    first_step: int
    last_step: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """It had no row in ``num_steps`` steps, since a block that it needed was not granted in time."""

    at_ms: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """It lost its blocks; ``num_lost_tokens`` are to be computed again, as far as they are not found cached.

    ``by`` got what it lost: a running request, a waiting one, itself when it ran alone; None when a process was lost.
    """

    at_ms: int
    cause: PreemptionCause
    by: Peer | None
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """It ended."""

    at_ms: int
    reason: FinishReason
    num_output_tokens: int
    error: ErrorReason | None
    error_text: str


TimelineEvent: TypeAlias = Queued | Blocked | Admitted | Scheduled | Stalled | Preempted | Finished


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """All that is known of one request, oldest event first.

    Attributes:
        request_id: Id of the request, or of one choice.
        tenant: On whose account it ran.
        model: As asked for.
        priority: Its class.
        status: Where it stands, in the words of ``RequestStatus``.
        num_prompt_tokens: Length of the prompt.
        num_events_left_out: Events of the middle that were dropped, since there were too many.
        events: What happened.
    """

    request_id: str
    tenant: str
    model: str
    priority: PriorityClass
    status: str
    num_prompt_tokens: int
    num_events_left_out: int
    events: tuple[TimelineEvent, ...]

    def seen_by(self, tenant: str) -> "RequestTimeline":
        """Return what ``tenant`` may see: of other tenants' requests neither id nor tenant."""
        return replace(self, events=tuple(_hide_others(event, tenant) for event in self.events))


def _hide_others(event: TimelineEvent, tenant: str) -> TimelineEvent:
    match event:
        case Queued(behind=Peer() as peer) if peer.tenant != tenant:
            return replace(event, behind=Peer("", "", peer.priority))
        case Preempted(by=Peer() as peer) if peer.tenant != tenant:
            return replace(event, by=Peer("", "", peer.priority))
        case _:
            return event
