"""The command line: exit statuses, and errors on standard error."""

from pathlib import Path

import pytest

from services.launcher.cli import main
from services.launcher.model_catalogue import DEFAULT_MODEL


def test_version_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("treadle ")


def test_model_list_tells_what_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))
    assert main(["model", "list"]) == 0
    assert capsys.readouterr().out.startswith(f"{DEFAULT_MODEL}  94 MiB")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["model", "pull", "nope"], "no model is named 'nope'"),
        (["serve", "--http-port", "0"], "http_port must be 1 to 65535"),
        (["serve", "--model", "/no/such.gguf"], "neither a known model"),
    ],
)
def test_wrong_value_exits_with_2_and_says_what_to_change(
    argv: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


def test_unknown_command_exits_with_2() -> None:
    with pytest.raises(SystemExit) as raised:
        main(["fly"])
    assert raised.value.code == 2
