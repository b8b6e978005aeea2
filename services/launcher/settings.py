"""What `treadle serve` can be told, and where each value comes from.

Guarantees: flag over ``TREADLE_SERVE_*`` over the ``serve:`` section of the file over default. Settings of the services
that were not given stay unset here and are not passed on, so that each service's own rule (environment, its section of
the same file, its default) decides; there is one place for each default.
"""

import argparse
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

from services.common.config import LogLevel, field_docs, load_config, require_config
from services.common.errors import EngineError, ErrorReason
from services.common.logs import LogFormat
from services.launcher.model_catalogue import DEFAULT_MODEL

SECTION: Final = "serve"
FILE_SECTIONS: Final = frozenset({SECTION, "gateway", "scheduler", "kv_cache", "worker"})
_LARGEST_PORT: Final = 65_535
_MOST_WORKERS: Final = 16
_RECORD_FOLDER: Final = "plans"
_VALUE_IF_BARE: Final = {"record": ""}
"""What a flag that may stand without a value means then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of a local mesh."""

    model: str = DEFAULT_MODEL
    """Name of a known model (fetched when missing), a GGUF file, or a Hugging Face model directory."""

    model_name: str | None = None
    """Name under which the model is served; unset: its own."""

    host: str = "127.0.0.1"
    """Address that clients connect to. Anything but a loopback address lets others in: there are no keys yet."""

    http_port: int = 8080
    """Port of the OpenAI-compatible HTTP server; also what tells one local mesh from another."""

    grpc_port: int | None = None
    """Port of the public gRPC server; unset: the HTTP port plus one."""

    workers: int = 1
    """Number of worker processes; each holds the weights and its own KV cache. 1 to 16."""

    tcp: bool = False
    """Connect the services by TCP on the loopback address instead of Unix sockets."""

    backend: str | None = None
    """What computes, `auto`, `native` or `torch`; unset: the worker's default."""

    dtype: str | None = None
    """Number format of the computation, `float32` or `bfloat16`; unset: the worker's default."""

    quantization: str | None = None
    """What floating weights are converted to at load, `int8` or `int4`; unset: nothing."""

    activation_bits: int | None = None
    """Exactness of linear layers in the native engine, 8, 16 or 32 bits; unset: the worker's default."""

    activations: str | None = None
    """What activations are there, `auto`, `bfloat16`, `int8` or `rotated`; unset: the worker's default."""

    kv_dtype: str | None = None
    """Number format of keys and values, `auto`, `bfloat16`, `float32` or `int8`; unset: the worker's default."""

    device: str | None = None
    """Device of the workers, such as `auto` or `cpu`; unset: the worker's default."""

    kv_cache_gib: float | None = None
    """KV cache of each worker in GiB; unset: the worker's default."""

    swap_space_gib: float | None = None
    """Host memory of each worker for blocks that its KV cache has no room for, in GiB; unset: none."""

    swap_compression: str | None = None
    """How blocks are written in that memory, `none` or `int8`; unset: the worker's default."""

    max_model_len: int | None = None
    """Longest prompt plus output in tokens; unset: the worker's default."""

    speculation: str | None = None
    """Whether tokens are guessed in advance, `none` or `ngram`: faster where text repeats itself; unset:
    the worker's default."""

    speculation_tokens: int | None = None
    """Most tokens guessed at a time; unset: the worker's default."""

    speculation_min_ngram: int | None = None
    """Fewest last tokens that must have occurred before; unset: the worker's default."""

    speculation_max_ngram: int | None = None
    """Most last tokens that are compared; unset: the worker's default."""

    max_num_batched_tokens: int | None = None
    """Most tokens in one step; unset: the scheduler's default."""

    max_num_requests: int | None = None
    """Most requests in one step; unset: the scheduler's default."""

    run_ahead_depth: int | None = None
    """Plans in flight to a worker, 1 (lockstep) or more; unset: the scheduler's default."""

    state_dir: str | None = None
    """Directory for what outlives a run: the merged log `mesh.log` and its older parts, 64 MiB in all, and recorded
    plans. Created if absent, for this user alone; unset: nothing is kept."""

    record: str | None = None
    """Directory of the plan log: every arrival, plan and result, for `treadle replay`. Without a name, it is
    `plans` in the state directory; unset: nothing is recorded."""

    record_redact: bool | None = None
    """Record digests instead of token ids; unset: the scheduler's default."""

    drain_timeout_s: float = 30.0
    """Longest time, in seconds, that running requests may take after a stop was asked for."""

    log_format: LogFormat = "text"
    """`text` for people, `json` for machines: one object a line."""

    log_level: LogLevel = "info"
    """Lowest level that is logged."""

    def __post_init__(self) -> None:
        """Check what can be checked without the machine."""
        require_config(bool(self.host), "host", "must not be empty")
        require_config(1 <= self.http_port <= _LARGEST_PORT, "http_port", f"must be 1 to {_LARGEST_PORT}")
        require_config(1 <= self.public_grpc_port <= _LARGEST_PORT, "grpc_port", f"must be 1 to {_LARGEST_PORT}")
        require_config(self.public_grpc_port != self.http_port, "grpc_port", "must differ from http_port")
        require_config(1 <= self.workers <= _MOST_WORKERS, "workers", f"must be 1 to {_MOST_WORKERS}")
        require_config(self.state_dir != "", "state_dir", "must not be empty")
        is_record_placed = self.record != "" or self.state_dir is not None
        require_config(is_record_placed, "record", "needs a directory, or --state-dir, to put its log in")
        require_config(self.drain_timeout_s >= 0, "drain_timeout_s", "must not be negative")

    @property
    def state_path(self) -> Path | None:
        """The state directory as an absolute path, if one was given."""
        return None if self.state_dir is None else _absolute(self.state_dir)

    @property
    def record_path(self) -> Path | None:
        """The directory of the plan log as an absolute path, if one is to be written."""
        if self.record == "":
            assert self.state_path is not None
            return self.state_path / _RECORD_FOLDER
        return None if self.record is None else _absolute(self.record)

    @property
    def public_grpc_port(self) -> int:
        """The gRPC port, given or derived."""
        return self.http_port + 1 if self.grpc_port is None else self.grpc_port


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The settings, and the file that the services read their own sections from.

    Attributes:
        settings: As given and defaulted.
        config_path: Absolute path of the file, if one was named.
    """

    settings: ServeSettings
    config_path: Path | None


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` a flag for each setting, and ``--config``."""
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file, a section a service")
    docs = field_docs(ServeSettings)
    for name, hint in typing.get_type_hints(ServeSettings).items():
        flag = "--" + name.replace("_", "-")
        text = docs[name].replace("%", "%%")
        if bool in (hint, *typing.get_args(hint)):
            parser.add_argument(
                flag, dest=name, action="store_const", const="true", default=argparse.SUPPRESS, help=text
            )
        else:
            action = parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=text, metavar=_metavar(hint))
            if name in _VALUE_IF_BARE:
                action.nargs, action.const = "?", _VALUE_IF_BARE[name]


def load_serve_command(given: Mapping[str, str], environ: Mapping[str, str]) -> ServeCommand:
    """Combine the parsed flags with environment and file.

    Args:
        given: Text by field name, only of flags that were given; ``config`` among them.
        environ: The environment.

    Raises:
        EngineError: INVALID_CONFIG; the metadata name the field.
    """
    config_path = Path(given["config"]).expanduser().resolve() if "config" in given else None
    if config_path is not None:
        _require_known_sections(config_path)
    argv: Sequence[str] = [f"--{name.replace('_', '-')}={text}" for name, text in given.items()]
    return ServeCommand(load_config(ServeSettings, SECTION, argv, environ), config_path)


def _require_known_sections(path: Path) -> None:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EngineError(ErrorReason.INVALID_CONFIG, f"config file {path}: {error}", field="config") from error
    known = ", ".join(sorted(FILE_SECTIONS))
    for section in document if isinstance(document, dict) else ():
        require_config(section in FILE_SECTIONS, str(section), f"in {path} is not a section; the sections are {known}")


def _absolute(directory: str) -> Path:
    return Path(directory).expanduser().absolute()


def _metavar(hint: object) -> str:
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(typing.get_args(hint)) + "}"
    members = typing.get_args(hint) or (hint,)
    return {int: "N", float: "X"}.get(typing.cast("type", members[0]), "TEXT")
