import itertools

import pytest

from services.common.errors import InvariantError
from services.scheduler.core.request import RequestStatus
from tests.unit.scheduler.harness import bare_request

LEGAL = {
    ("waiting", "admitting"),
    ("waiting", "finished"),
    ("admitting", "running"),
    ("admitting", "waiting"),
    ("admitting", "preempted"),
    ("admitting", "finished"),
    ("running", "preempted"),
    ("running", "finished"),
    ("preempted", "admitting"),
    ("preempted", "finished"),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestStatus, repeat=2)))
def test_status_changes_only_as_the_table_says(old: RequestStatus, new: RequestStatus) -> None:
    request = bare_request(1)
    request.status = old
    if (old.value, new.value) in LEGAL:
        request.change_status(new)
        assert request.status is new
    else:
        with pytest.raises(InvariantError, match="changes legally"):
            request.change_status(new)
