"""The client-side journal of one stream: every output token that arrived, and how far its reader has come.

Owns: the token ids of one request from position 0, its end, and the reader's position. Guarantees: positions without
gap or repeat (what arrives again after a reconnect is dropped); what waits for a slow reader is coalesced, so memory is
bounded by the request's ``max_tokens`` ids; the tokens stay, so that a lost scheduler can be told where to go on.
One writer (the scheduler's stream), one reader (the surface).
"""

import asyncio
from collections.abc import Sequence

from services.common.errors import EngineError
from services.common.verify import require
from services.gateway.ports import Finish, TokenEvent


class StreamJournal:
    """Append-only record of one request's output with one reader."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_read = 0
        self._finish: Finish | None = None
        self._error: EngineError | None = None
        self._is_finish_read = False
        self._arrival = asyncio.Event()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All output tokens so far."""
        return tuple(self._token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of output tokens so far, which is the position of the next."""
        return len(self._token_ids)

    @property
    def is_closed(self) -> bool:
        """Whether the end or a failure was recorded; nothing can follow."""
        return self._finish is not None or self._error is not None

    def append(self, seq: int, token_ids: Sequence[int], finish: Finish | None = None) -> None:
        """Record tokens from output position ``seq`` on; positions already known are skipped.

        Raises:
            InvariantError: a position is missing before ``seq``, or a known position has another token now.
        """
        if self.is_closed:
            return
        num_known = len(self._token_ids)
        require(seq <= num_known, "output tokens arrive without a gap", seq=seq, num_known=num_known)
        num_repeated = min(num_known - seq, len(token_ids))
        is_same = list(token_ids[:num_repeated]) == self._token_ids[seq : seq + num_repeated]
        require(is_same, "tokens that arrive again are the same", seq=seq, num_known=num_known)
        self._token_ids.extend(token_ids[num_repeated:])
        self._finish = finish
        self._arrival.set()

    def fail(self, error: EngineError) -> None:
        """Record that nothing will follow; the reader gets what waits first, then ``error``."""
        if not self.is_closed:
            self._error = error
            self._arrival.set()

    async def read(self) -> TokenEvent:
        """Wait until something is unread and take all of it.

        Cancellation: nothing is lost.

        Raises:
            StopAsyncIteration: the finish was read.
            EngineError: as recorded by :meth:`fail`.
        """
        if self._is_finish_read:
            raise StopAsyncIteration
        await self._arrival.wait()
        start = self._num_read
        if start == len(self._token_ids) and self._error is not None:
            raise self._error
        if self._error is None:
            self._arrival.clear()
        self._num_read = len(self._token_ids)
        self._is_finish_read = self._finish is not None
        return TokenEvent(start, tuple(self._token_ids[start:]), self._finish)
