"""Settings and metrics are documented where people look: services/SETTINGS.md and services/launcher/README.md."""

import dataclasses
import re

import pytest

from scripts import gen_settings
from services.common.config import field_docs
from tests.repository.sources import ROOT, sources_under

README = (ROOT / "services/launcher/README.md").read_text(encoding="utf-8")
METRIC = re.compile(r'"(treadle_(?:gateway|scheduler|kv_cache|worker)_[a-z_]+)"')


def test_settings_are_documented_as_they_are() -> None:
    assert (ROOT / "services/SETTINGS.md").read_text(encoding="utf-8") == gen_settings.render()


@pytest.mark.parametrize("config", [config for _, _, config, _ in gen_settings.SECTIONS])
def test_every_setting_has_a_docstring(config: type) -> None:
    docs = field_docs(config)
    assert [field.name for field in dataclasses.fields(config) if not docs.get(field.name)] == []


def test_metrics_are_named() -> None:
    names = {name for source in sources_under("services/") for name in METRIC.findall(source.text)}
    assert sorted(name for name in names if f"`{name}`" not in README) == []
