"""Figures from outcomes: percentiles, rates, a table for people and a JSON document for machines.

The definitions are in README.md of this folder; they follow vLLM's ``benchmarks`` (``vllm bench serve``).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from scripts.bench.streaming_client import Outcome

PERCENTILES: Final = (50, 90, 99)
_MAX_SHOWN_ERRORS: Final = 5


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one latency, in milliseconds; NaN when there was nothing to measure."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Objective:
    """Bounds that a request must keep to count as good, in milliseconds; None is no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured.

    Attributes:
        duration_s: From the first request sent to the last stream ended.
        num_completed: Requests that ended well.
        num_failed: The others; they count in no latency and no rate.
        errors: Some of their errors.
        num_prompt_tokens: Of completed requests.
        num_output_tokens: Of completed requests.
        output_tokens_per_s: Output tokens over the duration.
        total_tokens_per_s: Prompt and output tokens over the duration.
        requests_per_s: Completed requests over the duration.
        goodput_requests_per_s: Completed requests that kept the objective, over the duration.
        ttft_ms: Time to first token.
        tpot_ms: Time per output token after the first.
        itl_ms: Time between two events of one stream.
        e2e_ms: From sending to the end of the stream.
        client_cpu_ratio: CPU time of the load generator over the duration; near 1, it is the bottleneck.
    """

    duration_s: float
    num_completed: int
    num_failed: int
    errors: tuple[str, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    goodput_requests_per_s: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    client_cpu_ratio: float

    def as_document(self) -> dict[str, object]:
        """Return the report for JSON."""
        return asdict(self)


def make_report(
    outcomes: Sequence[Outcome], num_input_tokens: int, objective: Objective, client_cpu_s: float
) -> Report:
    """Condense the outcomes of a run.

    Args:
        outcomes: Of the measured requests, without warm-up.
        num_input_tokens: Prompt length to assume for servers that do not report usage.
        objective: What counts as good.
        client_cpu_s: CPU seconds that the load generator used during the run.
    """
    completed = [outcome for outcome in outcomes if _has_completed(outcome)]
    failed = [outcome.error or "no text arrived" for outcome in outcomes if not _has_completed(outcome)]
    duration_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes) if outcomes else math.nan
    num_output = sum(outcome.num_output_tokens for outcome in completed)
    prompt_counts = (outcome.num_prompt_tokens for outcome in completed)
    num_prompt = sum(num_input_tokens if count is None else count for count in prompt_counts)
    num_good = sum(_is_good(outcome, objective) for outcome in completed)
    return Report(
        duration_s=duration_s,
        num_completed=len(completed),
        num_failed=len(failed),
        errors=tuple(sorted(set(failed))[:_MAX_SHOWN_ERRORS]),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_output + num_prompt) / duration_s,
        requests_per_s=len(completed) / duration_s,
        goodput_requests_per_s=num_good / duration_s,
        ttft_ms=distribution([time_to_first_token_ms(outcome) for outcome in completed]),
        tpot_ms=distribution([ms for outcome in completed if (ms := time_per_output_token_ms(outcome)) is not None]),
        itl_ms=distribution([ms for outcome in completed for ms in inter_token_latencies_ms(outcome)]),
        e2e_ms=distribution([(outcome.end_s - outcome.sent_s) * 1000 for outcome in completed]),
        client_cpu_ratio=client_cpu_s / duration_s,
    )


def time_to_first_token_ms(outcome: Outcome) -> float:
    """From sending the request to the first event with text. Pure."""
    return (outcome.event_s[0] - outcome.sent_s) * 1000


def time_per_output_token_ms(outcome: Outcome) -> float | None:
    """From the first event with text to the last, over the tokens after the first; None with one token. Pure."""
    if outcome.num_output_tokens < 2:
        return None
    return (outcome.event_s[-1] - outcome.event_s[0]) * 1000 / (outcome.num_output_tokens - 1)


def inter_token_latencies_ms(outcome: Outcome) -> list[float]:
    """Gaps between successive events with text. Pure."""
    return [(later - earlier) * 1000 for earlier, later in zip(outcome.event_s, outcome.event_s[1:], strict=False)]


def distribution(values: Sequence[float]) -> Distribution:
    """Return mean, percentiles and maximum. Pure."""
    if not values:
        return Distribution(math.nan, math.nan, math.nan, math.nan, math.nan)
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, between neighbours by linear interpolation (as numpy does). Pure."""
    position = (len(ordered) - 1) * percent / 100
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


def format_report(report: Report) -> str:
    """Return the report as a table."""
    lines = [
        f"requests      {report.num_completed} completed, {report.num_failed} failed, {report.duration_s:.1f} s",
        f"tokens        {report.num_prompt_tokens} in, {report.num_output_tokens} out",
        f"throughput    {report.output_tokens_per_s:.1f} output tok/s, {report.total_tokens_per_s:.1f} total tok/s, "
        f"{report.requests_per_s:.2f} requests/s, goodput {report.goodput_requests_per_s:.2f} requests/s",
        f"client        {report.client_cpu_ratio:.0%} of a core",
        f"{'':8}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}  ms",
    ]
    for name, figures in (
        ("TTFT", report.ttft_ms),
        ("TPOT", report.tpot_ms),
        ("ITL", report.itl_ms),
        ("e2e", report.e2e_ms),
    ):
        values = (figures.mean, figures.p50, figures.p90, figures.p99, figures.max)
        lines.append(f"{name:8}" + "".join(f"{value:10.2f}" for value in values))
    lines.extend(f"error         {error}" for error in report.errors)
    return "\n".join(lines)


def _has_completed(outcome: Outcome) -> bool:
    return outcome.error is None and bool(outcome.event_s)


def _is_good(outcome: Outcome, objective: Objective) -> bool:
    tpot_ms = time_per_output_token_ms(outcome)
    keeps_ttft = objective.ttft_ms is None or time_to_first_token_ms(outcome) <= objective.ttft_ms
    keeps_tpot = objective.tpot_ms is None or tpot_ms is None or tpot_ms <= objective.tpot_ms
    return keeps_ttft and keeps_tpot
