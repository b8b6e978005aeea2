from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.kv_cache.core import QuotaRule, Quotas
from services.kv_cache.quota_file import read_quotas


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "quotas.yaml"
    path.write_text(text)
    return path


def test_file_gives_rules_with_their_defaults(tmp_path: Path) -> None:
    text = """
quotas:
  - {tenant: acme, reserved: 0.25}
  - {tenant: "*", limit: 0.5}
  - {model: small, tenant: acme, reserved: 0.1, limit: 1}
"""
    assert read_quotas(written(tmp_path, text)) == Quotas(
        (
            QuotaRule("*", "acme", 0.25, 1.0),
            QuotaRule("*", "*", 0.0, 0.5),
            QuotaRule("small", "acme", 0.1, 1.0),
        )
    )


def test_file_without_rules_is_no_quotas(tmp_path: Path) -> None:
    assert read_quotas(written(tmp_path, "quotas:\n")) == Quotas()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quotas: [", "while parsing"),
        ("- 1", "one key"),
        ("quota: []", "one key"),
        ("quotas: {}\nother: 1", "one key"),
        ("quotas: 3", "must be a list"),
        ("quotas: [acme]", "rule 1 must be a mapping"),
        ("quotas: [{reserved: 0.1}]", "rule 1 must be a mapping"),
        ("quotas: [{tenant: a, share: 0.1}]", "rule 1 must be a mapping"),
        ("quotas: [{tenant: 7}]", "must be text"),
        ("quotas: [{tenant: a, limit: true}]", "rule 1: limit must be a number"),
        ("quotas: [{tenant: a, reserved: '0.1'}]", "rule 1: reserved must be a number"),
        ("quotas: [{tenant: a, reserved: 0.6}, {tenant: b, reserved: 0.6}]", "add up to 1.2"),
    ],
)
def test_file_is_refused_with_the_place_when_it_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(EngineError, match=message) as error:
        read_quotas(written(tmp_path, text))
    assert (error.value.reason, error.value.metadata["field"]) == (ErrorReason.INVALID_CONFIG, "quotas_file")


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such file"):
        read_quotas(tmp_path / "none.yaml")
