"""The error tree of the mesh: kinds that mirror gRPC codes, and the catalogue of reasons.

Guarantees: dependency-free, so that pure cores may raise these; every reason has exactly one kind and one retry rule.
Only ``services.common.rpc.status`` translates them to and from the wire.
"""

from dataclasses import dataclass
from enum import Enum


class ErrorKind(Enum):
    """Failure classes; names equal the gRPC status codes they become."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNAVAILABLE = "UNAVAILABLE"
    ABORTED = "ABORTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class ReasonRule:
    """What a reason implies: its kind, its HTTP status, and whether the caller may simply try again."""

    kind: ErrorKind
    http_status: int
    is_retryable: bool


class ErrorReason(Enum):
    """Machine-readable reasons, one per row of the catalogue in protos/README.md."""

    INVALID_REQUEST = "INVALID_REQUEST"
    UNSUPPORTED_PARAMETER = "UNSUPPORTED_PARAMETER"
    INVALID_SAMPLING_PARAMS = "INVALID_SAMPLING_PARAMS"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    EXCEEDS_KV_CAPACITY = "EXCEEDS_KV_CAPACITY"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    UNKNOWN_REQUEST = "UNKNOWN_REQUEST"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    QUEUE_FULL = "QUEUE_FULL"
    RATE_LIMITED = "RATE_LIMITED"
    KV_CACHE_EXHAUSTED = "KV_CACHE_EXHAUSTED"
    SLOW_READER = "SLOW_READER"
    DRAINING = "DRAINING"
    SCHEDULER_UNAVAILABLE = "SCHEDULER_UNAVAILABLE"
    WORKER_UNAVAILABLE = "WORKER_UNAVAILABLE"
    KV_CACHE_UNAVAILABLE = "KV_CACHE_UNAVAILABLE"
    STALE_EPOCH = "STALE_EPOCH"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CLIENT_CANCELLED = "CLIENT_CANCELLED"
    STEP_FAILED = "STEP_FAILED"
    INVALID_CONFIG = "INVALID_CONFIG"
    MODEL_LOAD_FAILED = "MODEL_LOAD_FAILED"
    PLAN_LOG_BROKEN = "PLAN_LOG_BROKEN"
    REPLAY_REFUSED = "REPLAY_REFUSED"
    INVARIANT_VIOLATED = "INVARIANT_VIOLATED"


_K = ErrorKind
RULES: dict[ErrorReason, ReasonRule] = {
    ErrorReason.INVALID_REQUEST: ReasonRule(_K.INVALID_ARGUMENT, 400, False),
    ErrorReason.UNSUPPORTED_PARAMETER: ReasonRule(_K.INVALID_ARGUMENT, 400, False),
    ErrorReason.INVALID_SAMPLING_PARAMS: ReasonRule(_K.INVALID_ARGUMENT, 400, False),
    ErrorReason.PROMPT_TOO_LONG: ReasonRule(_K.INVALID_ARGUMENT, 400, False),
    ErrorReason.EXCEEDS_KV_CAPACITY: ReasonRule(_K.INVALID_ARGUMENT, 400, False),
    ErrorReason.PAYLOAD_TOO_LARGE: ReasonRule(_K.INVALID_ARGUMENT, 413, False),
    ErrorReason.MODEL_NOT_FOUND: ReasonRule(_K.NOT_FOUND, 404, False),
    ErrorReason.UNKNOWN_REQUEST: ReasonRule(_K.NOT_FOUND, 404, False),
    ErrorReason.DUPLICATE_REQUEST: ReasonRule(_K.ALREADY_EXISTS, 409, False),
    ErrorReason.QUEUE_FULL: ReasonRule(_K.RESOURCE_EXHAUSTED, 429, True),
    ErrorReason.RATE_LIMITED: ReasonRule(_K.RESOURCE_EXHAUSTED, 429, True),
    ErrorReason.KV_CACHE_EXHAUSTED: ReasonRule(_K.RESOURCE_EXHAUSTED, 429, True),
    ErrorReason.SLOW_READER: ReasonRule(_K.RESOURCE_EXHAUSTED, 429, False),
    ErrorReason.DRAINING: ReasonRule(_K.UNAVAILABLE, 503, True),
    ErrorReason.SCHEDULER_UNAVAILABLE: ReasonRule(_K.UNAVAILABLE, 503, True),
    ErrorReason.WORKER_UNAVAILABLE: ReasonRule(_K.UNAVAILABLE, 503, True),
    ErrorReason.KV_CACHE_UNAVAILABLE: ReasonRule(_K.UNAVAILABLE, 503, True),
    ErrorReason.STALE_EPOCH: ReasonRule(_K.ABORTED, 503, True),
    ErrorReason.DEADLINE_EXCEEDED: ReasonRule(_K.DEADLINE_EXCEEDED, 504, False),
    ErrorReason.CLIENT_CANCELLED: ReasonRule(_K.CANCELLED, 499, False),
    ErrorReason.STEP_FAILED: ReasonRule(_K.INTERNAL, 500, False),
    ErrorReason.INVALID_CONFIG: ReasonRule(_K.FAILED_PRECONDITION, 500, False),
    ErrorReason.MODEL_LOAD_FAILED: ReasonRule(_K.FAILED_PRECONDITION, 500, False),
    ErrorReason.PLAN_LOG_BROKEN: ReasonRule(_K.FAILED_PRECONDITION, 500, False),
    ErrorReason.REPLAY_REFUSED: ReasonRule(_K.FAILED_PRECONDITION, 500, False),
    ErrorReason.INVARIANT_VIOLATED: ReasonRule(_K.INTERNAL, 500, False),
}


class EngineError(Exception):
    """A failure with a reason of the catalogue, a text that says what to change, and metadata.

    Args:
        reason: Row of the catalogue; it determines kind, HTTP status and retry rule.
        message: For people; every variable in it is in ``metadata`` too.
        metadata: String values by key; ``field`` names the offending request field where there is one.

    Attributes:
        reason: As given.
        message: As given.
        metadata: As given.
    """

    def __init__(self, reason: ErrorReason, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = metadata

    @property
    def kind(self) -> ErrorKind:
        """The kind that the reason belongs to."""
        return RULES[self.reason].kind

    @property
    def http_status(self) -> int:
        """The HTTP status that a gateway answers with."""
        return RULES[self.reason].http_status

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later without change."""
        return RULES[self.reason].is_retryable

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.message}"


class InvariantError(EngineError):
    """A law of a core was broken: the state is not to be trusted and the process stops."""

    def __init__(self, message: str, **metadata: str) -> None:
        super().__init__(ErrorReason.INVARIANT_VIOLATED, message, **metadata)
