"""Configuration: frozen dataclasses filled from flags, environment, file and defaults, in that order of strength.

Owns the one rule for all services: a field ``max_num_requests`` of section ``scheduler`` is the flag
``--max-num-requests``, the variable ``TREADLE_SCHEDULER_MAX_NUM_REQUESTS`` and the key ``max_num_requests`` under
``scheduler:`` in the YAML file. Unknown keys and malformed values are errors; nothing is guessed.
The docstring below a field is its help text.
"""

import argparse
import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, Union, get_args, get_origin

import yaml

from services.common.errors import EngineError, ErrorReason
from services.common.logs import LogFormat

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What every service needs."""

    name: str = ""
    """Name in logs, metrics and `treadle status`; empty: the service's own."""

    listen: str = ""
    """Address of the gRPC server, `unix:PATH` or `HOST:PORT`. Required."""

    log_format: LogFormat = "text"
    """`text` for people, `json` for machines."""

    log_level: LogLevel = "info"
    """Lowest level that is logged."""

    state_dir: str = ""
    """Directory for what outlives a process; empty: nothing is kept."""

    lifeline_fd: int = -1
    """File descriptor whose end of file means that the launcher is gone; -1: none."""

    drain_timeout_s: float = 30.0
    """Longest time, in seconds, that running work may take after a stop was asked for."""

    notice_s: float = 0.0
    """Time, in seconds, between turning unready and refusing work, for load balancers to notice; 0 on one host."""

    verify_invariants: bool = False
    """Check costly invariants after every operation; on in tests, off by default for speed."""

    def __post_init__(self) -> None:
        """Check what can be checked without the machine."""
        require_config(bool(self.listen), "listen", "is required: unix:PATH or HOST:PORT")
        require_config(self.drain_timeout_s >= 0, "drain_timeout_s", "must not be negative")
        require_config(self.notice_s >= 0, "notice_s", "must not be negative")


C = TypeVar("C")


def require_config(condition: bool, field: str, message: str) -> None:
    """Raise INVALID_CONFIG that names ``field`` unless ``condition`` holds."""
    if not condition:
        raise EngineError(ErrorReason.INVALID_CONFIG, f"{field} {message}", field=field)


def load_config(cls: type[C], section: str, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """Fill ``cls`` from flags, environment, the file that ``--config`` names, and defaults.

    Args:
        cls: A frozen dataclass whose fields are str, int, float, bool, a Literal of strings, a tuple of strings, or one
            of these or None.
        section: Section of the file, and part of the variables' names.
        argv: Flags, without the program.
        environ: The environment.

    Raises:
        EngineError: INVALID_CONFIG; the metadata name the field.
    """
    flags = _parse_flags(cls, section, argv)
    config_path = flags.pop("config", None)
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {}
    if config_path is not None:
        values.update(read_config_file(Path(config_path), section, hints))
    prefix = f"TREADLE_{section.upper()}_"
    for name, hint in hints.items():
        if (text := environ.get(prefix + name.upper())) is not None:
            values[name] = parse_text(text, hint, name)
    values.update((name, parse_text(text, hints[name], name)) for name, text in flags.items())
    return cls(**values)


def read_config_file(path: Path, section: str, hints: Mapping[str, object]) -> dict[str, object]:
    """Return the values of one section of a YAML file, checked against the fields' types.

    Raises:
        EngineError: INVALID_CONFIG when the file cannot be read or the section has unknown or malformed entries.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EngineError(ErrorReason.INVALID_CONFIG, f"config file {path}: {error}", field="config") from error
    document = {} if document is None else document
    require_config(isinstance(document, dict), "config", f"file {path} must hold a mapping of sections")
    entries = document.get(section) or {}
    require_config(isinstance(entries, dict), section, f"in {path} must be a mapping")
    values: dict[str, object] = {}
    for key, value in entries.items():
        require_config(key in hints, f"{section}.{key}", f"in {path} is not a setting")
        values[key] = _check_value(value, hints[key], f"{section}.{key}")
    return values


def parse_text(text: str, hint: object, field: str) -> object:
    """Turn the text of a flag or variable into a value of the field's type.

    Raises:
        EngineError: INVALID_CONFIG.
    """
    hint = _without_none(hint)
    if get_origin(hint) is tuple:
        return tuple(part for part in text.split(",") if part)
    try:
        if hint is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if hint is int or hint is float:
            return hint(text)
    except (KeyError, ValueError):
        require_config(False, field, f"must be {_type_name(hint)}, not {text!r}")
    return _check_value(text, hint, field)


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def _parse_flags(cls: type, section: str, argv: Sequence[str]) -> dict[str, str]:
    parser = argparse.ArgumentParser(prog=f"services.{section}", allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with a section for each service", default=argparse.SUPPRESS)
    docs = field_docs(cls)
    for name in typing.get_type_hints(cls):
        flag = "--" + name.replace("_", "-")
        help_text = docs.get(name, "").replace("%", "%%")
        parser.add_argument(flag, dest=name, help=help_text, default=argparse.SUPPRESS, metavar="VALUE")
    return vars(parser.parse_args(list(argv)))


def _check_value(value: object, hint: object, field: str) -> object:
    if value is None and _allows_none(hint):
        return None
    hint = _without_none(hint)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        require_config(value in choices, field, f"must be one of {', '.join(choices)}, not {value!r}")
        return value
    if get_origin(hint) is tuple:
        is_strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
        require_config(is_strings, field, f"must be a list of strings, not {value!r}")
        return tuple(typing.cast("list[str]", value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_right = isinstance(value, typing.cast("type", hint)) and (hint is bool or not isinstance(value, bool))
    require_config(is_right, field, f"must be {_type_name(hint)}, not {value!r}")
    return value


def _allows_none(hint: object) -> bool:
    # `int | None` is a UnionType; `Literal[...] | None` and everything that was a string once is a typing.Union.
    return get_origin(hint) in (types.UnionType, Union) and types.NoneType in get_args(hint)


def _without_none(hint: object) -> object:
    if _allows_none(hint):
        (inner,) = (part for part in get_args(hint) if part is not types.NoneType)
        return typing.cast("object", inner)
    return hint


def _type_name(hint: object) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        typing.cast("type", hint), str(hint)
    )
