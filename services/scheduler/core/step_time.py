"""How long a step takes, learnt from steps: the time of one is taken to be ``base + slope * tokens``.

A weighted least-squares line over the recent steps of one worker, older ones counting less and less. Steps of equal
size say nothing of the slope, so while decoding goes on unchanged the slope that was learnt from the last prompts is
kept, and only the level follows.
"""

_DECAY = 0.98  # a step counts half after about 35 others
_MIN_VARIANCE = 4.0  # tokens squared; below it the slope would be noise
_FASTEST_DRIFT = 0.01


class StepTimeModel:
    """Figures of one worker's steps."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_ms = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._slope: float | None = None
        self._fastest_ms: float | None = None

    @property
    def fastest_ms(self) -> float | None:
        """About the shortest time of a recent step; None before the first."""
        return self._fastest_ms

    def line(self) -> tuple[float, float] | None:
        """Return the time of a step without tokens, and of each token, in ms; None while only one size is known."""
        if self._slope is None:
            return None
        return max(0.0, self._mean_ms - self._slope * self._mean_tokens), self._slope

    def note(self, num_tokens: int, time_ms: float) -> None:
        """Learn from a step that computed ``num_tokens`` (>= 1) in ``time_ms`` (> 0)."""
        if self._fastest_ms is None or time_ms < self._fastest_ms:
            self._fastest_ms = time_ms
        else:
            self._fastest_ms += _FASTEST_DRIFT * (time_ms - self._fastest_ms)
        # West's update of weighted means and moments (CACM 22(9), 1979), which does not cancel as plain sums would.
        weight = self._weight = self._weight * _DECAY + 1
        share = 1 / weight
        kept = 1 - share
        off_tokens, off_ms = num_tokens - self._mean_tokens, time_ms - self._mean_ms
        self._mean_tokens += share * off_tokens
        self._mean_ms += share * off_ms
        variance = self._variance = kept * (self._variance + share * off_tokens * off_tokens)
        covariance = self._covariance = kept * (self._covariance + share * off_tokens * off_ms)
        if variance >= _MIN_VARIANCE:
            self._slope = max(0.0, covariance / variance)

    def tokens_within(self, time_ms: float) -> int | None:
        """Return how many tokens a step of ``time_ms`` computes; None when nothing speaks against any number.

        While only steps of one size are known, a step in time says nothing, and one that took too long shrinks in
        proportion.
        """
        if self._slope is None:
            is_in_time = self._mean_ms <= time_ms
            return None if is_in_time else int(self._mean_tokens * time_ms / self._mean_ms)
        if self._slope == 0:
            return None if self._mean_ms <= time_ms else 0
        return max(0, int(self._mean_tokens + (time_ms - self._mean_ms) / self._slope))
