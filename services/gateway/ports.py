"""What the gateway needs from a scheduler: the port, and the values that cross it.

Guarantees: plain values only, so that every surface, the gRPC adapter (``remote.py``) and the fake of the tests meet
here; failures cross as :class:`services.common.errors.EngineError`, never as a status or a string.
"""

from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

from services.gateway.timeline import RequestTimeline

CHOICE_SEPARATOR = "#"
"""Between a request's id and the index of a choice; no client's id contains it."""


class FinishReason(Enum):
    """Why a request ended; a failure is an exception and not a reason."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Priority(Enum):
    """Service class of a request."""

    VIP = "vip"
    NORMAL = "normal"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; already validated and normalised.

    Attributes:
        temperature: >= 0; 0 selects greedily.
        top_p: In (0, 1]; 1 is off.
        top_k: >= 0; 0 is off.
        min_p: In [0, 1]; 0 is off.
        seed: uint64. With the sample index and the output position it determines every draw.
        sample_index: Which sample of its prompt, from 0.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerRequest:
    """One generation as the scheduler sees it: token ids in, token ids out.

    Attributes:
        request_id: Unique among the live requests of the mesh.
        tenant: Identity that the edge established.
        idempotency_key: The client's, or None.
        deadline_unix_ms: When the answer stops being of use, in milliseconds since the epoch.
        priority: Service class.
        cache_scope: Who may share prefix blocks; derived from the tenant, never from the client's text.
        model: Served name.
        weight_version: Version that the model reported when the request was accepted.
        prompt_token_ids: At least one id.
        sampling: How to draw.
        max_tokens: >= 1; prompt and output together fit the model's context.
        min_tokens: >= 0; no end before so many output tokens.
        eos_token_ids: The model's end tokens; empty when the client asked to ignore them.
        stop_token_ids: The client's own end tokens.
        leader_request_id: The sample of the same prompt that computes the prompt for this one too, or None.
        is_max_tokens_implied: Whether the client named no limit, so that the output may be cut for want of quota.
    """

    request_id: str
    tenant: str
    idempotency_key: str | None
    deadline_unix_ms: int
    priority: Priority
    cache_scope: str
    model: str
    weight_version: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    leader_request_id: str | None = None
    is_max_tokens_implied: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended and what it cost.

    Attributes:
        reason: Why.
        stop_token_id: The end token that was sampled. It is the last token of the event, and is counted.
        num_prompt_tokens: Prompt length.
        num_output_tokens: Tokens sampled, the end token included.
        num_cached_tokens: Prompt tokens that a prefix hit saved when the request was first admitted.
        num_draft_tokens: Output tokens that were guessed in advance.
        num_accepted_tokens: How many of them came true.
    """

    reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Output tokens that follow each other, and the end if they are the last.

    Attributes:
        seq: 0-based output position of the first token.
        token_ids: Empty only if ``finish`` is set.
        finish: Set on the last event. STOP and LENGTH travel with the token that caused them.
    """

    seq: int
    token_ids: tuple[int, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that some worker serves.

    Attributes:
        name: What clients write in ``model``.
        max_model_len: Prompt plus output, in tokens.
        created_unix_s: When serving began.
        weight_version: Identity of the weights, and of how they are computed.
    """

    name: str
    max_model_len: int
    created_unix_s: int
    weight_version: str


class Generation(Protocol):
    """One live request: an async context manager that is also the iterator of its events.

    Entering submits. Iterating yields the tokens in order without gap or repeat; tokens that wait for the reader are
    coalesced into one event, so a slow reader costs memory for its token ids only. The event with ``finish`` is the
    last. Leaving before the request ended cancels it exactly once; leaving after its finish or failure does nothing.

    Cancellation: an interrupted ``__anext__`` loses nothing; the next call continues.
    """

    async def __aenter__(self) -> Self:
        """Submit the request.

        Raises:
            EngineError: SCHEDULER_UNAVAILABLE, DRAINING: it was not submitted.
        """
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the request unless it has ended; never waits for the answer."""
        ...

    def __aiter__(self) -> Self:
        """Return itself."""
        ...

    async def __anext__(self) -> TokenEvent:
        """Wait for the next event.

        Raises:
            StopAsyncIteration: the finish was read.
            EngineError: the request was refused or failed; tokens that came before it were yielded.
        """
        ...


class SchedulerPort(Protocol):
    """The scheduler, seen from a gateway. Only ``explain`` waits; the others read a mirror of what it reported."""

    def open_generation(self, request: SchedulerRequest) -> Generation:
        """Return the request's generation, not yet submitted."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Ask for the end of a live request of this gateway; its reader gets a finish of reason CANCELLED.

        Returns:
            Whether such a request is live.
        """
        ...

    def models(self) -> tuple[ServedModel, ...]:
        """Return the served models, the default first; empty while no scheduler or worker is connected."""
        ...

    def is_ready(self) -> bool:
        """Tell whether a request submitted now can be served."""
        ...

    def unready_reasons(self) -> tuple[str, ...]:
        """Say for people what readiness waits for; empty when ready."""
        ...

    async def explain(self, request_id: str, tenant: str) -> tuple[RequestTimeline, ...]:
        """Tell what happened to a request of ``tenant`` and to its choices, live or among the last that ended.

        Returns:
            In order of the choices; empty when none is known, or it is another tenant's.

        Raises:
            EngineError: SCHEDULER_UNAVAILABLE.
        """
        ...
