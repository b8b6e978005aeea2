"""Long-lived work: links that are kept up for ever, with back-off and jitter.

Tasks themselves belong to ``asyncio.TaskGroup``; this module owns only the one loop that every link of the mesh needs.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.common.errors import EngineError, ErrorReason, InvariantError

logger = logging.getLogger(__name__)

_FAILURES_BEFORE_COMPLAINT = 8
"""Failures in a row from the start that are not worth a line: the peer is usually just starting."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between tries: doubling from ``first_s`` to ``last_s``, each shortened by up to half at random."""

    first_s: float = 0.02
    """First delay, in seconds; short, since on one host the peer is usually just starting."""

    last_s: float = 1.0
    """Longest delay, in seconds."""

    def delay_s(self, num_failures: int) -> float:
        """Return the delay, in seconds, after ``num_failures`` (>= 1) failures in a row."""
        longest = min(self.last_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)


async def keep_up(link: str, run: Callable[[Callable[[], None]], Awaitable[None]], backoff: Backoff) -> None:
    """Run a link again and again until cancelled.

    Args:
        link: Name for the logs.
        run: One life of the link. It calls its argument once the peer has answered, which resets the back-off, and
            returns or raises EngineError when the link breaks.
        backoff: Delays between lives.

    Raises:
        InvariantError: passed on at once, since the state behind the link is not to be trusted.
        EngineError: STALE_EPOCH is passed on too: a newer life of this process exists, and this one must end.
    Cancellation: leaves nothing behind; ``run`` is cancelled.
    """
    num_failures = 0
    has_been_up = False

    def on_up() -> None:
        nonlocal num_failures, has_been_up
        if has_been_up:
            logger.info("link is up again", extra={"fields": {"link": link}})
        num_failures, has_been_up = 0, True

    while True:
        try:
            await run(on_up)
            reason = "closed by the peer"
        except InvariantError:
            raise
        except EngineError as error:
            if error.reason is ErrorReason.STALE_EPOCH:
                raise
            reason = str(error)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # A TaskGroup inside ``run`` that fails in the moment of a cancellation raises the failure alone.
            raise asyncio.CancelledError
        num_failures += 1
        if has_been_up and num_failures == 1:
            logger.warning("link is down", extra={"fields": {"link": link, "reason": reason}})
        elif num_failures == _FAILURES_BEFORE_COMPLAINT:
            logger.warning("link does not come up", extra={"fields": {"link": link, "reason": reason}})
        await asyncio.sleep(backoff.delay_s(num_failures))
