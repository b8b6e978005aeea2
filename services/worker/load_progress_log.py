"""Says in the log how far loading is."""

import logging

from services.common.clock import Clock

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5


class LoadProgressLog:
    """A ``ProgressCallback`` that logs at most every half second, so that a large model does not look stuck."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = clock.monotonic_s()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Log a bar, if it is time."""
        now_s = self._clock.monotonic_s()
        if now_s - self._last_s < _INTERVAL_S and done_bytes < total_bytes:
            return
        self._last_s = now_s
        share = done_bytes / total_bytes if total_bytes else 1.0
        bar = "#" * round(share * 20)
        logger.info("loading [%-20s] %3d %% of %d MB", bar, round(share * 100), total_bytes // 1_000_000)
