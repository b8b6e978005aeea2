"""One running generation on its way from tokens to text; the same for every surface.

Guarantees: leaving it before its end cancels the request at the scheduler; a stop string ends the request there at
once; usage counts what was delivered; the deadline holds even if the scheduler is silent. Requests come
from ``text_generator.py``.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.gateway.metrics import GatewayMetrics
from services.gateway.output_fold import OutputFold, OutputRule, stop_reason
from services.gateway.patience import Patience
from services.gateway.ports import Finish, FinishReason, SchedulerPort, SchedulerRequest, TokenEvent
from services.gateway.tokenizer import Tokenizer
from services.gateway.validated_request import Surface

_USAGE_WAIT_S = 1.0
"""How long a request that a stop string ended waits for the scheduler's last word on its usage."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost.

    Attributes:
        num_prompt_tokens: Prompt length.
        num_output_tokens: Tokens that were delivered, the one that ended the output included.
        num_cached_tokens: Prompt tokens saved by a prefix hit.
        num_draft_tokens: Output tokens that were guessed in advance.
        num_accepted_tokens: How many of them came true.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain, with the tokens since the delta before.

    Attributes:
        seq: 0-based output position of the first token.
        token_ids: At least one; text may lag behind its tokens.
        text: Whole characters; empty only where the surface asked for every token.
    """

    seq: int
    token_ids: tuple[int, ...]
    text: str

    @property
    def num_output_tokens(self) -> int:
        """Output tokens up to and with this delta."""
        return self.seq + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TextEnd:
    """The end of a request's output.

    Attributes:
        token_ids: Tokens that came after the last delta and have no text.
        reason: Why it ended.
        stop_reason: The stop string, or the client's stop token, that ended it.
        usage: What it cost.
    """

    token_ids: tuple[int, ...]
    reason: FinishReason
    stop_reason: str | int | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be submitted.

    Attributes:
        surface: Where it came in.
        request: For the scheduler.
        rule: How its tokens become text.
        seed: As the client wrote it, or as chosen here.
    """

    surface: Surface
    request: SchedulerRequest
    rule: OutputRule
    seed: int

    @property
    def is_first_sample(self) -> bool:
        """Whether its prompt counts in the request's usage; the other samples share it."""
        return self.request.sampling.sample_index == 0


@dataclass(frozen=True, slots=True)
class Backing:
    """What generations stand on.

    Attributes:
        scheduler: Runs them.
        tokenizer: The served model's.
        metrics: Told about each.
        clock: For deadlines and durations.
    """

    scheduler: SchedulerPort
    tokenizer: Tokenizer
    metrics: GatewayMetrics
    clock: Clock


class TextGeneration:
    """One running generation: an async context manager and the iterator of its deltas, then one end.

    Entering submits, leaving early cancels. Cancellation: an interrupted ``__anext__`` loses nothing.

    Args:
        prepared: What to run.
        backing: What to run it with.
        yields_every_token: Whether tokens come out while their text is still held back, with an empty text.
    """

    def __init__(self, prepared: PreparedRequest, backing: Backing, *, yields_every_token: bool = False) -> None:
        self.prepared = prepared
        self._scheduler = backing.scheduler
        self._metrics = backing.metrics
        self._clock = backing.clock
        self._yields_every_token = yields_every_token
        self._fold = OutputFold(backing.tokenizer, prepared.rule)
        self._generation = backing.scheduler.open_generation(prepared.request)
        self._stack = AsyncExitStack()
        self._patience = Patience()
        self._start_s = self._last_s = backing.clock.monotonic_s()
        self._expiry_s = 0.0
        self._num_tokens = 0
        self._pending_ids: list[int] = []
        self._stop: str | None = None
        self._finish: Finish | None = None
        self._is_folded = False
        self._outcome: str | None = None

    async def __aenter__(self) -> Self:
        """Submit the request.

        Raises:
            EngineError: it was not submitted.
        """
        request, surface = self.prepared.request, self.prepared.surface
        try:
            await self._stack.enter_async_context(self._generation)
        except EngineError as error:
            self._metrics.refused(surface, outcome=error.reason.value.lower())
            raise
        self._start_s = self._last_s = self._clock.monotonic_s()
        self._expiry_s = asyncio.get_running_loop().time() + (request.deadline_unix_ms - self._clock.unix_ms()) / 1000
        self._metrics.started(surface, num_prompt_tokens=len(request.prompt_token_ids))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the request unless it has ended."""
        seconds = self._clock.monotonic_s() - self._start_s
        reason = error.reason.value.lower() if isinstance(error, EngineError) else FinishReason.CANCELLED.value
        self._metrics.ended(self.prepared.surface, outcome=self._outcome or reason, seconds=seconds)
        self._patience.close()
        await self._stack.aclose()

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> TextDelta | TextEnd:
        """Wait for the next piece of the answer.

        Raises:
            StopAsyncIteration: the end was given.
            EngineError: the request failed, or its deadline passed (DEADLINE_EXCEEDED).
        """
        while not self._is_folded:
            delta = self._take(await self._next_event())
            if delta is not None:
                return delta
        if self._outcome is not None:
            raise StopAsyncIteration
        return await self._end()

    async def _next_event(self) -> TokenEvent:
        try:
            with self._patience.until(self._expiry_s):
                event = await anext(self._generation)
        except TimeoutError:
            message = "The answer did not complete within the request's time limit; allow more time or fewer tokens."
            raise EngineError(ErrorReason.DEADLINE_EXCEEDED, message) from None
        self._measure(event)
        return event

    def _measure(self, event: TokenEvent) -> None:
        if not event.token_ids:
            return
        now_s = self._clock.monotonic_s()
        report = self._metrics.next_tokens if event.seq else self._metrics.first_tokens
        report(self.prepared.surface, num_tokens=len(event.token_ids), seconds=now_s - self._last_s)
        self._last_s = now_s

    def _take(self, event: TokenEvent) -> TextDelta | None:
        """Fold an event; a stop string ends the request at the scheduler at once."""
        folded = self._fold.take(event)
        self._pending_ids.extend(event.token_ids[: folded.num_tokens - event.seq])
        self._num_tokens = folded.num_tokens
        if folded.is_end:
            self._is_folded, self._stop, self._finish = True, folded.stop, event.finish
            if event.finish is None:
                self._scheduler.cancel(self.prepared.request.request_id)
        if not folded.text and not (self._yields_every_token and self._pending_ids):
            return None
        delta = TextDelta(self._num_tokens - len(self._pending_ids), tuple(self._pending_ids), folded.text)
        self._pending_ids.clear()
        return delta

    async def _end(self) -> TextEnd:
        if self._finish is None:
            self._finish = await self._await_finish()
        reason = FinishReason.STOP if self._finish is None or self._stop is not None else self._finish.reason
        usage = Usage(
            num_prompt_tokens=len(self.prepared.request.prompt_token_ids),
            num_output_tokens=self._num_tokens,
            num_cached_tokens=0 if self._finish is None else self._finish.num_cached_tokens,
            num_draft_tokens=0 if self._finish is None else self._finish.num_draft_tokens,
            num_accepted_tokens=0 if self._finish is None else self._finish.num_accepted_tokens,
        )
        self._metrics.guessed(
            self.prepared.surface, num_drafted=usage.num_draft_tokens, num_accepted=usage.num_accepted_tokens
        )
        self._outcome = reason.value
        reached = stop_reason(self._finish, self._stop, self.prepared.rule)
        return TextEnd(tuple(self._pending_ids), reason, reached, usage)

    async def _await_finish(self) -> Finish | None:
        """Wait for the scheduler's account of a request that a stop string ended; the answer stands without it."""
        try:
            async with asyncio.timeout(_USAGE_WAIT_S):
                async for event in self._generation:
                    if event.finish is not None:
                        return event.finish
        except (TimeoutError, EngineError):
            pass
        return None
