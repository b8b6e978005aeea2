"""`treadle replay DIR`: the recorded plans once more, on a worker that the launcher has started for it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from services.common.errors import EngineError, ErrorReason
from services.common.version import short_weight_version
from services.scheduler.plan_log.streams import StreamSummary, list_streams
from services.scheduler.plan_log.worker_replay import ReplayOutcome, replay_stream, require_replayable


def check_log(directory: Path) -> str:
    """Verify a log, and return in words what of it can be run again.

    Raises:
        EngineError: REPLAY_REFUSED when nothing can; PLAN_LOG_BROKEN.
    """
    chosen = _choose_streams(list_streams(directory))
    num_steps = sum(stream.num_steps for stream in chosen)
    return f"the log is intact; running {num_steps} steps of {_describe_kind(chosen[-1])} again"


async def replay_on_worker(directory: Path, address: str, say: Callable[[str], None]) -> bool:
    """Run every whole stream of the newest worker's model again; return whether all came out the same.

    Args:
        directory: Of the log.
        address: gRPC target of the worker.
        say: Takes lines for people.

    Raises:
        EngineError: REPLAY_REFUSED, PLAN_LOG_BROKEN, or what the worker answers.
    """
    streams = list_streams(directory)
    chosen = _choose_streams(streams)
    for stream in streams:
        if stream.num_steps and stream not in chosen:
            say(f"{stream.title}: left out, {_why_left_out(stream, chosen[-1])}")
    num_different = 0
    # Streams of one life of a worker follow each other, since the later ones reuse what the earlier ones have cached.
    lives = list(dict.fromkeys(stream.capabilities.worker_epoch for stream in chosen))
    by_life = sorted(chosen, key=lambda stream: lives.index(stream.capabilities.worker_epoch))
    newest_epoch = max(stream.scheduler_epoch for stream in chosen)
    for stream in by_life:
        outcome = await replay_stream(directory, stream, address, newest_epoch)
        say(f"{stream.title}: {describe_outcome(outcome, stream.num_steps)}")
        num_different += outcome.difference is not None
    say("all tokens are the same" if not num_different else f"{num_different} of {len(chosen)} streams differ")
    return not num_different


def describe_outcome(outcome: ReplayOutcome, num_steps: int) -> str:
    """Say in words what became of a stream of ``num_steps``. Pure."""
    difference = outcome.difference
    if difference is None:
        return f"{outcome.num_steps} steps, {outcome.num_tokens} tokens, the same"
    return (
        f"step {difference.step} of {num_steps} (plan {difference.plan_id}) is the first that differs: request "
        f"{difference.request_id}, output position {difference.output_position}: "
        f"recorded {_token(difference.recorded)}, now {_token(difference.replayed)}; "
        f"{outcome.num_tokens} tokens before it are the same"
    )


def _choose_streams(streams: Sequence[StreamSummary]) -> list[StreamSummary]:
    """Return the streams that one worker can run again: whole ones, of the newest model and number format."""
    executed = [stream for stream in streams if stream.num_steps]
    if not executed:
        raise EngineError(ErrorReason.REPLAY_REFUSED, "the log holds no executed step")
    whole = [stream for stream in executed if _can_be_replayed(stream)]
    if not whole:
        require_replayable(executed[-1])
    return [stream for stream in whole if _kind(stream) == _kind(whole[-1])]


def _can_be_replayed(stream: StreamSummary) -> bool:
    try:
        require_replayable(stream)
    except EngineError:
        return False
    return True


def _why_left_out(stream: StreamSummary, newest: StreamSummary) -> str:
    try:
        require_replayable(stream)
    except EngineError as error:
        return error.message.removeprefix(f"{stream.title}: ")
    return f"since it ran {_describe_kind(stream)}, the newest {_describe_kind(newest)}"


def _kind(stream: StreamSummary) -> tuple[str, str, str]:
    capabilities = stream.capabilities
    return capabilities.model, capabilities.weight_version, capabilities.dtype


def _describe_kind(stream: StreamSummary) -> str:
    model, weight_version, dtype = _kind(stream)
    return f"{model} {short_weight_version(weight_version)} {dtype}"


def _token(token_id: int | None) -> str:
    return "no token" if token_id is None else f"token {token_id}"
