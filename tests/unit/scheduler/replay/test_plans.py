"""Which streams of a log are run again on one worker."""

from pathlib import Path

from services.scheduler.replay.plans import check_log
from tests.unit.scheduler.plan_log.test_streams import Record, received, sent, started, write

DIGEST = "0123456789abcdef0123456789abcdef"


def started_with(stream: int, weight_version: str) -> Record:
    record = started(stream, worker_epoch=stream)
    record.worker_started.capabilities.model = "m"
    record.worker_started.capabilities.dtype = "q4_1"
    record.worker_started.capabilities.weight_version = weight_version
    return record


def test_streams_of_weights_that_were_computed_otherwise_are_left_out(tmp_path: Path) -> None:
    """Versions that differ behind the digest were one kind, and the worker then refused the log as a whole."""
    of_older = [started_with(1, f"{DIGEST}-rotated"), sent(1), received(1), sent(2), received(2)]
    of_newer = [started_with(2, f"{DIGEST}-bf16"), sent(1, stream=2), received(1, 2)]
    write(tmp_path, *of_older, *of_newer)
    assert check_log(tmp_path) == "the log is intact; running 1 steps of m 01234567-bf16 q4_1 again"
