from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from services.common.config import ServiceConfig, field_docs, load_config
from services.common.errors import EngineError, ErrorReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleConfig(ServiceConfig):
    """An example."""

    size: int = 1
    """How large, in tokens."""

    share: float | None = None
    """A share, or none."""

    mode: Literal["plain", "fancy"] = "plain"
    """How."""

    second_mode: Literal["plain", "fancy"] | None = None
    """How else, if at all."""

    is_on: bool = False
    """Whether."""

    peers: tuple[str, ...] = ()
    """Who."""


def load(*argv: str, environ: dict[str, str] | None = None) -> ExampleConfig:
    return load_config(ExampleConfig, "example", ["--listen", "unix:x", *argv], environ or {})


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_config_takes_flag_over_variable_over_file_over_default(tmp_path: Path):
    file = write(tmp_path, "example: {size: 2, share: 0.5, mode: fancy}")
    environ = {"TREADLE_EXAMPLE_SIZE": "3", "TREADLE_EXAMPLE_SHARE": "0.25"}

    config = load("--config", file, "--size", "4", environ=environ)

    assert (config.size, config.share, config.mode, config.is_on) == (4, 0.25, "fancy", False)


def test_config_takes_a_choice_that_may_be_missing(tmp_path: Path):
    assert load().second_mode is None
    assert load("--second-mode", "fancy").second_mode == "fancy"
    assert load("--config", write(tmp_path, "example: {second_mode: plain}")).second_mode == "plain"
    assert load("--config", write(tmp_path, "example: {second_mode: null}")).second_mode is None


def test_config_splits_tuples_at_commas():
    assert load("--peers", "a,b").peers == ("a", "b")


def test_config_reads_lists_from_a_file(tmp_path: Path):
    assert load("--config", write(tmp_path, "example: {peers: [a, b]}")).peers == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--size", "many"], "size"),
        (["--size", "1.5"], "size"),
        (["--share", "half"], "share"),
        (["--mode", "odd"], "mode"),
        (["--second-mode", "odd"], "second_mode"),
        (["--is-on", "perhaps"], "is_on"),
        (["--drain-timeout-s", "-1"], "drain_timeout_s"),
        (["--listen", ""], "listen"),
    ],
)
def test_config_names_the_field_when_a_flag_is_malformed(argv: list[str], field: str):
    with pytest.raises(EngineError) as caught:
        load(*argv)
    assert caught.value.reason is ErrorReason.INVALID_CONFIG
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("example: {sizes: 1}", "example.sizes"),
        ("example: {size: true}", "example.size"),
        ("example: {size: '1'}", "example.size"),
        ("example: {peers: a}", "example.peers"),
        ("example: {is_on: 1}", "example.is_on"),
        ("example: [1]", "example"),
        ("[1]", "config"),
        ("{", "config"),
    ],
)
def test_config_names_the_field_when_a_file_is_malformed(tmp_path: Path, text: str, field: str):
    with pytest.raises(EngineError) as caught:
        load("--config", write(tmp_path, text))
    assert caught.value.metadata["field"] == field


def test_config_refuses_a_file_that_is_not_there():
    with pytest.raises(EngineError, match="config file"):
        load("--config", "/nonexistent/config.yaml")


def test_config_takes_whole_numbers_where_any_number_is_wanted(tmp_path: Path):
    assert load("--config", write(tmp_path, "example: {share: 1}")).share == 1.0


def test_field_docs_cover_every_field_of_a_class_and_its_bases():
    docs = field_docs(ExampleConfig)
    assert set(docs) == set(ExampleConfig.__dataclass_fields__)
    assert docs["size"] == "How large, in tokens."
