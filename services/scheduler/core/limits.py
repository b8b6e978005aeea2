"""The scheduler's bounds, and the figures it reports about itself."""

from dataclasses import dataclass

from services.common.errors import EngineError, ErrorReason


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the queue.

    Attributes:
        max_num_batched_tokens: Tokens of one step; at least ``max_num_requests``, so that every decode always fits.
        max_num_requests: Running requests per worker.
        max_waiting_requests: Requests in the queue, beyond which a submission is refused.
        max_waiting_tokens: Known tokens of those, likewise; a single request may exceed it when nothing else waits.
        run_ahead_depth: Plans in flight per worker; 1 is lockstep, 2 hides the round trip.
        credit_tokens: Slots that a running request holds ahead of need, so that no step waits for the KV-cache manager.
    """

    max_num_batched_tokens: int = 512
    max_num_requests: int = 64
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    run_ahead_depth: int = 2
    credit_tokens: int = 8

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise EngineError(ErrorReason.INVALID_CONFIG, f"{name} must be at least 1", field=name)
        if self.max_num_batched_tokens < self.max_num_requests:
            raise EngineError(
                ErrorReason.INVALID_CONFIG,
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_requests "
                f"({self.max_num_requests}), or running requests would wait for each other",
                field="max_num_batched_tokens",
            )


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker is busy with now."""

    worker: str
    num_running: int
    num_in_flight_plans: int


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """What the scheduler is busy with now, and counts since its start.

    ``num_waiting`` includes requests whose admission is being asked for. ``num_preemptions`` counts every return of a
    running request to the queue, whatever the cause.
    """

    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    num_preemptions: int
    num_steps: int
    num_scheduled_tokens: int
    num_sampled_tokens: int
    workers: tuple[WorkerLoad, ...]
