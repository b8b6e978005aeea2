"""Time as a dependency: a protocol, the system's clock, and one that tests move by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for everything that must be testable."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...


class SystemClock:
    """The clock of the machine."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, *, unix_ms: int = 1_700_000_000_000) -> None:
        self._monotonic_s = 0.0
        self._unix_ms = unix_ms

    def advance(self, seconds: float) -> None:
        """Move both readings forward by ``seconds`` (>= 0)."""
        assert seconds >= 0
        self._monotonic_s += seconds
        self._unix_ms += round(seconds * 1000)

    def monotonic_s(self) -> float:
        """Seconds advanced so far."""
        return self._monotonic_s

    def unix_ms(self) -> int:
        """Start plus the milliseconds advanced so far."""
        return self._unix_ms
