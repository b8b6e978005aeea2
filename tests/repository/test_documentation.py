"""Settings and metrics are documented where people look: services/launcher/README.md."""

import dataclasses
import re

import pytest

from services.common.config import ServiceConfig, field_docs
from services.gateway.config import GatewayConfig
from services.kv_cache.config import KVCacheConfig
from services.launcher.settings import ServeSettings
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from tests.repository.sources import ROOT, sources_under

README = (ROOT / "services/launcher/README.md").read_text(encoding="utf-8")
METRIC = re.compile(r'"(treadle_(?:gateway|scheduler|kv_cache|worker)_[a-z_]+)"')


def rows_of(config: type, base: type | None = None) -> list[str]:
    """The table rows that the README must have for a configuration, without the fields of its base."""
    inherited = {field.name for field in dataclasses.fields(base)} if base else set()
    docs = field_docs(config)
    rows = []
    for field in dataclasses.fields(config):
        if field.name not in inherited:
            default = "" if field.default in ("", None, ()) else f"`{field.default}`"
            rows.append(f"| `{field.name}` | {default} | {docs[field.name].replace('|', '&#124;')} |")
    return rows


CONFIGS = [
    (ServeSettings, None),
    (ServiceConfig, None),
    *((config, ServiceConfig) for config in (GatewayConfig, SchedulerConfig, KVCacheConfig, WorkerConfig)),
]


@pytest.mark.parametrize(("config", "base"), CONFIGS, ids=[config.__name__ for config, _ in CONFIGS])
def test_settings_have_their_rows(config: type, base: type | None) -> None:
    missing = [row for row in rows_of(config, base) if row not in README]
    assert not missing, "services/launcher/README.md needs these rows:\n" + "\n".join(missing)


def test_readme_has_no_row_of_a_setting_that_does_not_exist() -> None:
    rows = {row for config, base in CONFIGS for row in rows_of(config, base)}
    assert [line for line in README.splitlines() if line.startswith("| `") and " | " in line and line not in rows] == []


def test_metrics_are_named() -> None:
    names = {name for source in sources_under("services/") for name in METRIC.findall(source.text)}
    assert sorted(name for name in names if f"`{name}`" not in README) == []
