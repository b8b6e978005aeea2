"""A worker's device for tests of the wire: the next token is a hash of all tokens before it, and no tensor exists.

It keeps what the real executor promises: plans take effect in the order of ``submit``, a future each. It applies the
laws that the real one checks: known handles, slots for every position.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field

from services.common.errors import EngineError, ErrorReason
from services.common.verify import require
from services.worker.plan import BatchPlan, BlockCopy, RowDraft, SampledToken, StepResult, StepTimings

VOCAB_SIZE = 1000


def next_token(token_ids: list[int]) -> int:
    """The only continuation of a sequence; never below 10, so that tests have ids that never come by themselves."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=8).digest()
    return 10 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 10)


def continuation(prompt: list[int], count: int) -> list[int]:
    """The output of an undisturbed request."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass(slots=True)
class _Request:
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class FakeExecutor:
    """Implements ``services.worker.servicer.Executor``.

    Args:
        block_size: Slots a block.
        is_open: Cleared, steps wait; for tests that need a step to take long.
        failing_token: A row whose request has this token in its prompt fails its whole step.
        max_draft_tokens: Tokens that it guesses where it may.
    """

    block_size: int = 16
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    failing_token: int | None = None
    max_draft_tokens: int = 0
    requests: dict[int, _Request] = field(default_factory=dict)
    block_copies: list[BlockCopy] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.is_open.set()

    def submit(self, plan: BatchPlan) -> "asyncio.Future[StepResult]":
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        try:
            result = self._execute(plan)
            self.block_copies += plan.block_copies
        except Exception as error:
            future.set_exception(error)
            return future
        asyncio.get_running_loop().call_soon(self._settle, future, result)
        return future

    def reset(self) -> "asyncio.Future[None]":
        self.requests.clear()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def handles(self) -> "asyncio.Future[tuple[int, ...]]":
        future: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        future.set_result(tuple(self.requests))
        return future

    def num_requests(self) -> int:
        return len(self.requests)

    def _settle(self, future: "asyncio.Future[StepResult]", result: StepResult) -> None:
        if future.done():
            return
        if self.is_open.is_set():
            future.set_result(result)
        else:
            asyncio.get_running_loop().call_later(0.005, self._settle, future, result)

    def _execute(self, plan: BatchPlan) -> StepResult:
        self.num_steps += 1
        for handle in plan.finished_handles:
            self.requests.pop(handle, None)
        for new in plan.new_requests:
            self.requests[new.handle] = _Request(list(new.token_ids), new.num_computed_tokens, list(new.block_ids))
        sampled: list[SampledToken] = []
        drafts: list[RowDraft] = []
        for row in plan.rows:
            request = self.requests.get(row.handle)
            assert request is not None, f"unknown handle {row.handle}"
            if self.failing_token in request.token_ids:
                raise EngineError(ErrorReason.STEP_FAILED, "the device failed", plan_id=str(plan.plan_id))
            request.block_ids.extend(row.new_block_ids)
            request.num_computed_tokens += row.num_scheduled_tokens
            require(request.num_computed_tokens <= len(request.token_ids), "rows cover known tokens only")
            require(
                request.num_computed_tokens <= len(request.block_ids) * self.block_size, "every position has a slot"
            )
            end = request.num_computed_tokens + row.max_draft_tokens
            require(end <= len(request.block_ids) * self.block_size, "every guess has a slot")
            if row.is_sampling:
                guess = self._guess(request.token_ids, row.max_draft_tokens)
                drafts += [RowDraft(row.handle, len(guess))] if guess else []
                sampled += [SampledToken(row.handle, token_id) for token_id in self._sample(request, guess)]
        return StepResult(plan.plan_id, tuple(sampled), StepTimings(0.0, 0.0, 0.0), drafts=tuple(drafts))

    def _guess(self, token_ids: list[int], max_num_tokens: int) -> list[int]:
        """Guess rightly but for every third token of a sequence."""
        guess = continuation(token_ids, min(max_num_tokens, self.max_draft_tokens))
        return [token + ((len(token_ids) + place) % 3 == 0) for place, token in enumerate(guess)]

    def _sample(self, request: _Request, guess: list[int]) -> list[int]:
        """Sample one token, and one more for each guess that comes true."""
        token_ids: list[int] = []
        while len(token_ids) <= len(guess) and token_ids == guess[: len(token_ids)]:
            token_ids.append(next_token(request.token_ids))
            request.token_ids.append(token_ids[-1])
        request.num_computed_tokens += len(token_ids) - 1
        return token_ids
