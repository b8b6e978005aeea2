"""Settings of `treadle serve`: strength of the sources, and errors that name the field."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from services.common.errors import EngineError
from services.launcher.settings import ServeCommand, ServeSettings, add_serve_arguments, load_serve_command


def load(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> ServeCommand:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_arguments(parser)
    return load_serve_command(vars(parser.parse_args(argv)), environ or {})


def test_defaults_need_nothing() -> None:
    assert load() == ServeCommand(ServeSettings(), None)
    assert ServeSettings().public_grpc_port == 8081


def test_flag_wins_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("serve:\n  http_port: 1000\n  workers: 3\n  host: '::1'\nworker:\n  dtype: float32\n")
    environ = {"TREADLE_SERVE_HTTP_PORT": "2000", "TREADLE_SERVE_WORKERS": "4"}
    command = load(["--config", str(file), "--http-port", "3000"], environ)
    assert command.settings == ServeSettings(http_port=3000, workers=4, host="::1")
    assert command.config_path == file


def test_switch_needs_no_value() -> None:
    assert load(["--tcp"]).settings.tcp is True


def test_value_may_start_with_a_dash() -> None:
    assert load(["--model=-odd"]).settings.model == "-odd"


def test_state_directory_is_absolute_for_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/u")
    assert load().settings.state_path is None
    assert load(["--state-dir", "state"]).settings.state_path == tmp_path / "state"
    assert load(["--state-dir", "~/state"]).settings.state_path == Path("/home/u/state")


def test_plan_log_goes_where_it_is_told_or_below_the_state_directory(tmp_path: Path) -> None:
    assert load(["--state-dir", "/state"]).settings.record_path is None
    assert load(["--record", "/plans", "--state-dir", "/state"]).settings.record_path == Path("/plans")
    assert load(["--record", "--state-dir", "/state"]).settings.record_path == Path("/state/plans")
    file = tmp_path / "mesh.yaml"
    file.write_text("serve: {state_dir: /state, record: ''}")
    assert load(["--config", str(file)]).settings.record_path == Path("/state/plans")


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--http-port", "0"], "http_port"),
        (["--http-port", "many"], "http_port"),
        (["--http-port", "65535"], "grpc_port"),
        (["--http-port", "80", "--grpc-port", "80"], "grpc_port"),
        (["--workers", "0"], "workers"),
        (["--workers", "17"], "workers"),
        (["--host", ""], "host"),
        (["--drain-timeout-s", "-1"], "drain_timeout_s"),
        (["--log-format", "xml"], "log_format"),
        (["--state-dir", ""], "state_dir"),
        (["--record"], "record"),
        (["--config", "/nowhere.yaml"], "config"),
    ],
)
def test_bad_value_is_refused_by_name(argv: list[str], field: str) -> None:
    with pytest.raises(EngineError) as raised:
        load(argv)
    assert raised.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("text", "field"),
    [("serve: {http_prt: 1}", "serve.http_prt"), ("wrker: {}", "wrker"), ("http_port: 1", "http_port")],
)
def test_unknown_key_in_the_file_is_refused(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(text)
    with pytest.raises(EngineError) as raised:
        load(["--config", str(file)])
    assert raised.value.metadata["field"] == field
