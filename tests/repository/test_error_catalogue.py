"""The error catalogue: code, table and classes say the same."""

import re

import pytest

from services.common.errors import RULES, EngineError, ErrorReason
from tests.repository.sources import ROOT

ROW = re.compile(r"^\| `?([A-Z_]+)`? \| `?([A-Z_]+)`? \| (\d+) \| (\w+)", re.MULTILINE)
ROWS = {
    reason: (kind, int(status), retry)
    for reason, kind, status, retry in ROW.findall((ROOT / "protos/README.md").read_text())
}


def test_every_reason_has_one_rule() -> None:
    assert set(RULES) == set(ErrorReason)


@pytest.mark.parametrize("reason", list(ErrorReason), ids=lambda reason: reason.value)
def test_reason_has_its_row_in_the_readme(reason: ErrorReason) -> None:
    assert reason.value in ROWS, "protos/README.md has no row for it"
    kind, http_status, _ = ROWS[reason.value]
    assert (kind, http_status) == (RULES[reason].kind.value, RULES[reason].http_status)


def test_readme_has_no_row_of_a_reason_that_does_not_exist() -> None:
    assert set(ROWS) <= {reason.value for reason in ErrorReason}


@pytest.mark.parametrize("error_class", EngineError.__subclasses__(), ids=lambda error_class: error_class.__name__)
def test_subclass_has_a_reason_of_its_own(error_class: type[EngineError]) -> None:
    reasons = [cls("text").reason for cls in EngineError.__subclasses__()]  # type: ignore[call-arg,arg-type]
    assert reasons.count(error_class("text").reason) == 1  # type: ignore[call-arg,arg-type]
