"""The quotas file: YAML that an operator edits, read at start and again when the process gets SIGHUP.

::

    quotas:
      - {tenant: acme, reserved: 0.25}                 # a quarter of every pool for certain, and all of it at most
      - {tenant: "*", limit: 0.5}                      # anybody else: half of a pool at most
      - {model: small, tenant: acme, reserved: 0.1, limit: 0.2}
"""

from pathlib import Path

import yaml

from services.common.errors import EngineError, ErrorReason
from services.kv_cache.core.quotas import ANY, QuotaRule, Quotas

_KEYS = {"model", "tenant", "reserved", "limit"}


def read_quotas(path: Path) -> Quotas:
    """Read and check a quotas file.

    Raises:
        EngineError: INVALID_CONFIG; the file cannot be read, has unknown or malformed entries, or makes no sense.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _invalid(path, str(error)) from error
    if not isinstance(document, dict) or document.keys() != {"quotas"}:
        raise _invalid(path, "must hold one key, quotas")
    entries = document["quotas"] or []
    if not isinstance(entries, list):
        raise _invalid(path, "quotas must be a list")
    rules = tuple(_parse_rule(path, number, entry) for number, entry in enumerate(entries, 1))
    try:
        return Quotas(rules)
    except EngineError as error:
        raise _invalid(path, error.message) from error


def _parse_rule(path: Path, number: int, entry: object) -> QuotaRule:
    if not isinstance(entry, dict) or not entry.keys() <= _KEYS or "tenant" not in entry:
        raise _invalid(path, f"rule {number} must be a mapping with tenant, and model, reserved and limit if need be")
    model, tenant = entry.get("model", ANY), entry["tenant"]
    if not isinstance(model, str) or not isinstance(tenant, str):
        raise _invalid(path, f"rule {number}: model and tenant must be text")
    return QuotaRule(
        model,
        tenant,
        reserved_ratio=_parse_share(path, number, "reserved", entry.get("reserved", 0.0)),
        limit_ratio=_parse_share(path, number, "limit", entry.get("limit", 1.0)),
    )


def _parse_share(path: Path, number: int, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(path, f"rule {number}: {key} must be a number from 0 to 1, not {value!r}")
    return float(value)


def _invalid(path: Path, text: str) -> EngineError:
    return EngineError(ErrorReason.INVALID_CONFIG, f"quotas_file {path}: {text}", field="quotas_file", path=str(path))
