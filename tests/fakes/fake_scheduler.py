"""A scheduler for gateway tests: deterministic answers, with bursts, stalls, failures and hand-driven steps.

It keeps the port's promises with the gateway's own journal, and keeps what tests ask about: submissions, live requests,
cancellations. It applies max_tokens and end tokens as the real one does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from services.common.errors import EngineError, ErrorReason
from services.gateway.journal import StreamJournal
from services.gateway.ports import CHOICE_SEPARATOR, Finish, FinishReason, SchedulerRequest, ServedModel, TokenEvent
from services.gateway.timeline import Admitted, Finished, Queued, RequestTimeline, Scheduled, TimelineEvent

DEFAULT_MODEL = ServedModel(
    name="fake", max_model_len=64, created_unix_s=1_700_000_000, weight_version="0123456789abcdef"
)


@dataclass(slots=True)
class FakeScheduler:
    """Implements ``SchedulerPort``.

    Args:
        answer: Output tokens of a request; repeated without end if the limits allow more.
        burst: Tokens made per read; ignored when hand-driven.
        is_manual: Nothing is made until the test calls :meth:`FakeGeneration.make`.
        hang_after: Stop making tokens at this output position, for ever.
        fail_after: Fail with ``failure`` at this output position.
        failing: Ids of the requests that fail so; None is all.
        refusal: Raised when a request is submitted.
        num_cached_tokens: Reported prefix hit.
        guesses: Reported tokens that were guessed, and that came true.
    """

    answer: Callable[[SchedulerRequest], Sequence[int]]
    burst: int = 1
    is_manual: bool = False
    hang_after: int | None = None
    fail_after: int | None = None
    failing: frozenset[str] | None = None
    failure: EngineError = field(default_factory=lambda: EngineError(ErrorReason.WORKER_UNAVAILABLE, "worker died"))
    refusal: EngineError | None = None
    num_cached_tokens: int = 0
    guesses: tuple[int, int] = (0, 0)
    served: tuple[ServedModel, ...] = (DEFAULT_MODEL,)
    reasons: tuple[str, ...] = ()
    requests: list[SchedulerRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    live: dict[str, "FakeGeneration"] = field(default_factory=dict)
    begun: dict[str, "FakeGeneration"] = field(default_factory=dict)

    def open_generation(self, request: SchedulerRequest) -> "FakeGeneration":
        return FakeGeneration(self, request)

    def cancel(self, request_id: str) -> bool:
        generation = self.live.get(request_id)
        if generation is None:
            return False
        self.cancelled.append(request_id)
        generation.finish(FinishReason.CANCELLED)
        return True

    async def explain(self, request_id: str, tenant: str) -> tuple[RequestTimeline, ...]:
        prefix = request_id + CHOICE_SEPARATOR
        return tuple(
            generation.timeline()
            for each, generation in self.begun.items()
            if (each == request_id or each.startswith(prefix)) and generation.tenant == tenant
        )

    def models(self) -> tuple[ServedModel, ...]:
        return self.served

    def is_ready(self) -> bool:
        return not self.reasons

    def unready_reasons(self) -> tuple[str, ...]:
        return self.reasons


class FakeGeneration:
    """Implements ``Generation``; makes its tokens when read, or when the test says so."""

    def __init__(self, scheduler: FakeScheduler, request: SchedulerRequest) -> None:
        self._scheduler = scheduler
        self._request = request
        self._answer = list(scheduler.answer(request))
        self._journal = StreamJournal()
        self._ended: FinishReason | None = None
        self._may_fail = scheduler.failing is None or request.request_id in scheduler.failing

    async def __aenter__(self) -> Self:
        if self._scheduler.refusal is not None:
            raise self._scheduler.refusal
        assert self._request.request_id not in self._scheduler.live
        self._scheduler.requests.append(self._request)
        self._scheduler.live[self._request.request_id] = self
        self._scheduler.begun[self._request.request_id] = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._scheduler.live[self._request.request_id]
        if not self._journal.is_closed:
            self._scheduler.cancelled.append(self._request.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._scheduler.is_manual:
            self.make(self._scheduler.burst)
        return await self._journal.read()

    @property
    def num_made(self) -> int:
        return self._journal.num_tokens

    @property
    def tenant(self) -> str:
        return self._request.tenant

    def timeline(self) -> RequestTimeline:
        """Tell that it arrived and ran alone; a step a token, a millisecond a step, from time 0 on."""
        request, num_made = self._request, self.num_made
        num_prompt_tokens, num_cached = len(request.prompt_token_ids), self._scheduler.num_cached_tokens
        events: list[TimelineEvent] = [
            Queued(0, 0, 0, None),
            Admitted(0, "worker-0", num_prompt_tokens, num_cached, 0),
            Scheduled(0, 1, "worker-0", "catch_up", 1, 1, num_prompt_tokens - num_cached),
        ]
        if num_made > 1:
            events.append(Scheduled(1, num_made, "worker-0", "decode", 2, num_made, num_made - 1))
        if self._ended is not None:
            events.append(Finished(num_made, self._ended.value, num_made, None, ""))
        status = "running" if self._ended is None else "finished"
        return RequestTimeline(
            request.request_id, request.model, request.priority.value, status, num_prompt_tokens, 0, tuple(events)
        )

    def make(self, num_tokens: int) -> None:
        """Make up to ``num_tokens`` tokens, ending as the limits say."""
        for _ in range(num_tokens):
            position = self._journal.num_tokens
            if self._journal.is_closed or position == self._scheduler.hang_after:
                return
            if position == self._scheduler.fail_after and self._may_fail:
                self._journal.fail(self._scheduler.failure)
                return
            self._append(position, self._answer[position % len(self._answer)])

    def finish(self, reason: FinishReason) -> None:
        """End without a further token."""
        self._journal.append(self.num_made, (), self._finish_of(reason, None, self.num_made))

    def _append(self, position: int, token_id: int) -> None:
        finish = None
        if token_id in self._request.eos_token_ids | self._request.stop_token_ids:
            finish = self._finish_of(FinishReason.STOP, token_id, position + 1)
        elif position + 1 == self._request.max_tokens:
            finish = self._finish_of(FinishReason.LENGTH, None, position + 1)
        self._journal.append(position, (token_id,), finish)

    def _finish_of(self, reason: FinishReason, stop_token_id: int | None, num_output_tokens: int) -> Finish:
        num_prompt_tokens = len(self._request.prompt_token_ids)
        self._ended = reason
        return Finish(
            reason,
            stop_token_id,
            num_prompt_tokens,
            num_output_tokens,
            self._scheduler.num_cached_tokens,
            *self._scheduler.guesses,
        )
