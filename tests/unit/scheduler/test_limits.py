import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core import SchedulerLimits


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_num_requests": 0}, "max_num_requests"),
        ({"run_ahead_depth": 0}, "run_ahead_depth"),
        ({"credit_tokens": 0}, "credit_tokens"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens"),
    ],
)
def test_limits_refuse_values_that_could_not_work(changes: dict[str, int], field: str) -> None:
    with pytest.raises(EngineError) as error:
        SchedulerLimits(**changes)
    assert error.value.reason is ErrorReason.INVALID_CONFIG
    assert error.value.metadata["field"] == field
