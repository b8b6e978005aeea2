"""An outbox: what one writer task sends next on a stream, gathered while the stream's flow control makes it wait.

Everything that happens between two writes goes out in one message, because a message costs the same whatever is in it.
Bound: the outbox holds no messages of its own; ``take`` builds the next one from state that its owner bounds.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """Hands the writer of a stream its next message.

    Args:
        take: Builds and removes the next message; None when there is nothing to send.
    """

    def __init__(self, take: Callable[[], Message | None]) -> None:
        self._take = take
        self._has_news = asyncio.Event()

    def notify(self) -> None:
        """Tell the writer that ``take`` may have something."""
        self._has_news.set()

    async def next(self) -> Message:
        """Wait until there is a message and take it.

        Cancellation: nothing is lost; a message is taken only when it is returned.
        """
        while True:
            message = self._take()
            if message is not None:
                return message
            self._has_news.clear()
            await self._has_news.wait()
