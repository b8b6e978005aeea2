"""A bound on waits that follow each other, with one timer for all of them.

``asyncio.timeout`` makes and cancels a timer for each wait, 4 us of a token's way out, twice. Here a timer stays when
its wait is over; when it fires it looks whether somebody waits, and for how long still.

Guarantees: those of ``asyncio.timeout``. A wait that is over its time is cancelled once and ends with TimeoutError; a
cancellation from elsewhere stays one, whichever came first.
"""

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """Bounds the waits of one task at a time; a context manager, entered through :meth:`until`.

    Belongs to the running loop. :meth:`close` drops the timer, which otherwise keeps this object until it fires.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._due_s: float | None = None
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._is_over = False

    def within(self, delay_s: float) -> Self:
        """Bound the next block to so many seconds from now."""
        return self.until(self._loop.time() + delay_s)

    def until(self, due_s: float) -> Self:
        """Bound the next block to a time of the loop's clock; one that has passed ends its first wait."""
        self._due_s = due_s
        return self

    def close(self) -> None:
        """Drop the timer; nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> Self:
        assert self._due_s is not None
        assert self._task is None, "one task at a time waits"
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        if self._timer is None or self._timer_s > self._due_s:
            self._arm(self._due_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task, self._due_s = self._task, None, None
        if not self._is_over:
            return
        self._is_over = False
        assert task is not None
        if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _arm(self, due_s: float) -> None:
        self.close()
        self._timer, self._timer_s = self._loop.call_at(due_s, self._fire), due_s

    def _fire(self) -> None:
        self._timer = None
        if self._task is None or self._due_s is None:
            return
        if self._loop.time() < self._due_s:
            self._arm(self._due_s)
            return
        self._is_over = True
        self._task.cancel()
