"""How fast the queue drains, to tell a refused client when to come back.

Counts of what left the queue for a worker decay with a time constant, so the rate follows the load and forgets what
was. Time is given in milliseconds and never goes back.
"""

import math

TIME_CONSTANT_MS = 10_000
MIN_AGE_MS = 1_000
MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60


class DrainMeter:
    """Exponentially decaying counts of requests and tokens."""

    def __init__(self) -> None:
        self._start_ms: int | None = None
        self._last_ms = 0
        self._num_requests = 0.0
        self._num_tokens = 0.0

    def note(self, num_tokens: int, now_ms: int) -> None:
        """Count a request with ``num_tokens`` that left the queue for a worker."""
        self._decay_to(now_ms)
        self._num_requests += 1
        self._num_tokens += num_tokens

    def retry_after_s(self, num_requests: int, num_tokens: int, now_ms: int) -> int:
        """Return in how many whole seconds so many requests and tokens will have left the queue at the measured rate.

        Within [1, 60]; the upper bound when nothing leaves it.
        """
        self._decay_to(now_ms)
        assert self._start_ms is not None
        # Counts that have grown for the time t hold 1 - exp(-t / T) of what old ones would, hence the divisor; t is not
        # taken for less than a second, since one request says nothing of a rate.
        age_ratio = -math.expm1(-max(MIN_AGE_MS, now_ms - self._start_ms) / TIME_CONSTANT_MS)
        window_s = TIME_CONSTANT_MS / 1000 * age_ratio
        wait_s = max(
            _time_to_drain_s(num_requests, self._num_requests / window_s),
            _time_to_drain_s(num_tokens, self._num_tokens / window_s),
        )
        return math.ceil(min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))

    def _decay_to(self, now_ms: int) -> None:
        if self._start_ms is None:
            self._start_ms = self._last_ms = now_ms
        factor = math.exp((self._last_ms - now_ms) / TIME_CONSTANT_MS)
        self._num_requests *= factor
        self._num_tokens *= factor
        self._last_ms = now_ms


def _time_to_drain_s(amount: int, rate: float) -> float:
    if amount <= 0:
        return 0.0
    return amount / rate if rate > 0 else MAX_RETRY_AFTER_S
