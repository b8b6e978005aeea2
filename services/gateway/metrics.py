"""The gateway's metrics in a registry of their own, so that several gateways fit one process.

Guarantees: updates cannot raise into a request (label sets are created at start, counters never get negative amounts);
the text form is the classic one whatever a scraper asks for.
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.gateway.validated_request import Surface

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class _SurfaceSeries:
    """The children of the labelled metrics for one surface; looked up once."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    duration: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter
    draft_tokens: Counter
    accepted_tokens: Counter
    running: Gauge


class GatewayMetrics:
    """Counts requests and measures their times."""

    def __init__(self) -> None:
        registry = CollectorRegistry(auto_describe=True)
        self._registry = registry
        by_surface = ("surface",)
        self._requests = Counter(
            "treadle_gateway_requests",
            "Requests by how they ended: stop, length, cancelled, or the reason of the error.",
            ("surface", "outcome"),
            registry=registry,
        )
        first = Histogram(
            "treadle_gateway_time_to_first_token_seconds",
            "From the submission of a request to its first token.",
            by_surface,
            buckets=_SECONDS,
            registry=registry,
        )
        between = Histogram(
            "treadle_gateway_inter_token_latency_seconds",
            "Time between two deliveries of a request, divided by the tokens in the second.",
            by_surface,
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        duration = Histogram(
            "treadle_gateway_request_duration_seconds",
            "From the submission of a request to its end.",
            by_surface,
            buckets=_SECONDS,
            registry=registry,
        )
        prompt = Counter("treadle_gateway_prompt_tokens", "Prompt tokens submitted.", by_surface, registry=registry)
        output = Counter("treadle_gateway_generation_tokens", "Tokens received.", by_surface, registry=registry)
        drafted = Counter(
            "treadle_gateway_draft_tokens",
            "Output tokens guessed in advance, of requests that ended well.",
            by_surface,
            registry=registry,
        )
        accepted = Counter(
            "treadle_gateway_accepted_tokens",
            "Guessed tokens that came true, of requests that ended well.",
            by_surface,
            registry=registry,
        )
        running = Gauge("treadle_gateway_running_streams", "Requests being served.", by_surface, registry=registry)
        self._series = {
            surface: _SurfaceSeries(
                time_to_first_token=first.labels(surface.value),
                inter_token_latency=between.labels(surface.value),
                duration=duration.labels(surface.value),
                prompt_tokens=prompt.labels(surface.value),
                generation_tokens=output.labels(surface.value),
                draft_tokens=drafted.labels(surface.value),
                accepted_tokens=accepted.labels(surface.value),
                running=running.labels(surface.value),
            )
            for surface in Surface
        }

    def started(self, surface: Surface, *, num_prompt_tokens: int) -> None:
        """Count a request that was submitted."""
        series = self._series[surface]
        series.running.inc()
        series.prompt_tokens.inc(num_prompt_tokens)

    def first_tokens(self, surface: Surface, *, num_tokens: int, seconds: float) -> None:
        """Record the first delivery of a request."""
        series = self._series[surface]
        series.time_to_first_token.observe(seconds)
        series.generation_tokens.inc(num_tokens)

    def next_tokens(self, surface: Surface, *, num_tokens: int, seconds: float) -> None:
        """Record a later delivery of ``num_tokens`` (>= 1), ``seconds`` after the one before."""
        series = self._series[surface]
        series.inter_token_latency.observe(seconds / num_tokens)
        series.generation_tokens.inc(num_tokens)

    def guessed(self, surface: Surface, *, num_drafted: int, num_accepted: int) -> None:
        """Count the tokens guessed for a request that ended well, and those of them that came true."""
        series = self._series[surface]
        series.draft_tokens.inc(num_drafted)
        series.accepted_tokens.inc(num_accepted)

    def ended(self, surface: Surface, *, outcome: str, seconds: float) -> None:
        """Record the end of a request that had started."""
        series = self._series[surface]
        series.running.dec()
        series.duration.observe(seconds)
        self._requests.labels(surface.value, outcome).inc()

    def refused(self, surface: Surface, *, outcome: str) -> None:
        """Count a request that was never submitted; ``outcome`` is the reason of the catalogue, in lower case."""
        self._requests.labels(surface.value, outcome).inc()

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format 0.0.4."""
        return generate_latest(self._registry)
