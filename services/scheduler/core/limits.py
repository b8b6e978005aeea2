"""The scheduler's bounds, and the figures it reports about itself."""

from dataclasses import dataclass

from services.common.errors import EngineError, ErrorReason

_MAY_BE_OFF = frozenset({"long_prefill_token_threshold", "batch_wait_ms", "target_itl_ms", "max_timelines"})


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the queue; those of the queue hold for each class.

    Attributes:
        max_num_batched_tokens: Tokens of one step; at least ``max_num_requests``, so that every decode always fits.
            Prompts fill it to :attr:`num_filled_tokens`, and to the last token only where that ends one.
        max_num_requests: Running requests per worker.
        max_waiting_requests: Requests in the queue, beyond which a submission is refused.
        max_waiting_tokens: Known tokens of those, likewise; a single request may exceed it when no other waits.
        run_ahead_depth: Plans in flight per worker; 1 is lockstep, 2 hides the round trip.
        credit_tokens: Slots that a running request holds ahead of need, so that no step waits for the KV-cache manager.
        long_prefill_token_threshold: Tokens of one prompt in one step; 0: as many as fit.
        batch_wait_ms: How long an idle worker waits for more requests to begin with; 0: it begins at once.
        target_itl_ms: Step time to keep to, as far as prompts and places decide it; 0: none.
        max_timelines: Ended requests that can be explained; 0: only live ones can.
    """

    max_num_batched_tokens: int = 544
    max_num_requests: int = 64
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    run_ahead_depth: int = 2
    credit_tokens: int = 8
    long_prefill_token_threshold: int = 0
    batch_wait_ms: int = 0
    target_itl_ms: float = 0.0
    max_timelines: int = 1000

    @property
    def num_filled_tokens(self) -> int:
        """Tokens up to which prompts fill a step.

        16 of every whole 256 are left for the last tokens of a prompt, which would cost a step of their own.
        """
        return self.max_num_batched_tokens - self.max_num_batched_tokens // 256 * 16

    def __post_init__(self) -> None:
        for name in self.__slots__:
            least = 0 if name in _MAY_BE_OFF else 1
            if getattr(self, name) < least:
                raise EngineError(ErrorReason.INVALID_CONFIG, f"{name} must be at least {least}", field=name)
        if self.max_num_batched_tokens < self.max_num_requests:
            raise EngineError(
                ErrorReason.INVALID_CONFIG,
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_requests "
                f"({self.max_num_requests}), or running requests would wait for each other",
                field="max_num_batched_tokens",
            )


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker is busy with now; a draining one gets nothing new."""

    worker: str
    num_running: int
    num_in_flight_plans: int
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """What the scheduler is busy with now, and counts since its start.

    ``num_waiting`` includes requests whose admission is being asked for. ``num_preemptions`` counts every return of a
    running request to the queue, whatever the cause. ``num_drafted_by_place`` counts guessed tokens by their place in
    the guess, ``num_accepted_by_place`` those of them that came true.
    """

    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    num_preemptions: int
    num_steps: int
    num_scheduled_tokens: int
    num_sampled_tokens: int
    workers: tuple[WorkerLoad, ...]
    num_drafted_by_place: tuple[int, ...] = ()
    num_accepted_by_place: tuple[int, ...] = ()
