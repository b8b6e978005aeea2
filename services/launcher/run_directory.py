"""The run directory of a local mesh: its Unix sockets, its description for `treadle status`, and the lock on its port.

Layout: ``<base>/<http_port>/`` with ``lock`` (held by the living launcher), ``mesh.json``, and one directory of sockets
per launch: services of a launcher that was killed may take seconds to go and must not remove a new mesh's sockets.
``<base>`` belongs to the user alone (mode 0700), which is what keeps other users away from the sockets.
"""

import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final, Self

from services.common.errors import EngineError, ErrorReason

_MESH_FILE: Final = "mesh.json"
_LOCK_FILE: Final = "lock"
_SOCKETS_PREFIX: Final = "s-"
# sun_path is 108 bytes with its terminating zero on Linux, 104 on macOS.
_LONGEST_SOCKET_PATH: Final = 103
_LONGEST_SOCKET_NAME: Final = len("/s-xxxxxx/scheduler.sock")


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """One process of a running mesh.

    Attributes:
        name: Such as ``worker-0``.
        service: Such as ``worker``; the name that its health answers for.
        address: gRPC target.
        pid: Process id, or None while it is being restarted.
    """

    name: str
    service: str
    address: str
    pid: int | None


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """A running mesh, as other commands find it.

    Attributes:
        launcher_pid: Process id of the launcher.
        url: Where its HTTP server listens.
        model: Name of the served model.
        services: Its processes, dependencies first.
    """

    launcher_pid: int
    url: str
    model: str
    services: tuple[ServiceRecord, ...]


class RunDirectory:
    """The directory of the mesh on one HTTP port, owned while the lock is held. Use as a context manager.

    Args:
        path: ``<base>/<http_port>``, as :func:`run_directory_candidates` gives it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sockets = path / f"{_SOCKETS_PREFIX}{secrets.token_hex(3)}"
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        """Take the lock and clear what dead launches left.

        Raises:
            EngineError: INVALID_CONFIG when a mesh runs on this port, or the directory cannot be trusted.
        """
        _make_private(self._path.parent)
        self._path.mkdir(mode=0o700, exist_ok=True)
        lock = (self._path / _LOCK_FILE).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise EngineError(
                ErrorReason.INVALID_CONFIG,
                f"a mesh already runs on HTTP port {self._path.name}; `treadle status --http-port {self._path.name}` "
                "shows it. Choose another --http-port.",
                field="http_port",
                http_port=self._path.name,
            ) from None
        self._lock = lock
        self._clear()
        self._sockets.mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what this launch made and drop the lock; the lock file stays, since removing it would race."""
        self._clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def socket_address(self, name: str) -> str:
        """Return the gRPC address of a service's Unix socket. Pure."""
        return f"unix:{self._sockets / name}.sock"

    def write(self, record: MeshRecord) -> None:
        """Publish the mesh's description; readers see the old or the new one, never a half."""
        scratch = self._path / f"{_MESH_FILE}.tmp"
        scratch.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        scratch.replace(self._path / _MESH_FILE)

    def _clear(self) -> None:
        (self._path / _MESH_FILE).unlink(missing_ok=True)
        for sockets in self._path.glob(f"{_SOCKETS_PREFIX}*"):
            shutil.rmtree(sockets, ignore_errors=True)


def run_directory_candidates(http_port: int, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return where the mesh of a port may keep its run directory, best first. Pure but for the user's id.

    Only paths short enough for a Unix socket below them are returned.

    Raises:
        EngineError: INVALID_CONFIG when none is short enough.
    """
    temporary = environ.get("TMPDIR") or tempfile.gettempdir()
    bases = [Path(temporary) / f"treadle-{os.getuid()}", Path("/tmp") / f"treadle-{os.getuid()}"]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        bases.insert(0, Path(runtime) / "treadle")
    candidates = tuple(dict.fromkeys(base / str(http_port) for base in bases))
    short = tuple(path for path in candidates if len(os.fsencode(path)) + _LONGEST_SOCKET_NAME <= _LONGEST_SOCKET_PATH)
    if not short:
        raise EngineError(
            ErrorReason.INVALID_CONFIG,
            f"no directory for Unix sockets has a short enough path (tried {', '.join(map(str, candidates))}). "
            "Set XDG_RUNTIME_DIR or TMPDIR to a shorter one, or give --tcp.",
            field="tcp",
        )
    return short


def choose_run_directory(http_port: int, environ: Mapping[str, str]) -> RunDirectory:
    """Return the run directory for a new mesh: the best candidate whose parent can be written.

    Raises:
        EngineError: INVALID_CONFIG when there is none.
    """
    candidates = run_directory_candidates(http_port, environ)
    for path in candidates:
        base = path.parent
        existing = base if base.exists() else base.parent
        if os.access(existing, os.W_OK | os.X_OK):
            return RunDirectory(path)
    raise EngineError(
        ErrorReason.INVALID_CONFIG, f"none of {', '.join(str(path.parent) for path in candidates)} can be written."
    )


def read_mesh_record(http_port: int, environ: Mapping[str, str]) -> MeshRecord | None:
    """Return the description of the mesh on a port, or None when none runs there.

    A description whose launcher no longer holds the lock is a leftover and not returned.
    """
    for path in run_directory_candidates(http_port, environ):
        try:
            document = json.loads((path / _MESH_FILE).read_text(encoding="utf-8"))
            if not _is_locked(path / _LOCK_FILE):
                continue
        except OSError:
            continue
        services = tuple(ServiceRecord(**service) for service in document.pop("services"))
        return MeshRecord(**document, services=services)
    return None


def _is_locked(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _make_private(base: Path) -> None:
    """Create ``base`` for this user alone, or check that it is; anybody may have made it first under /tmp."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = base.lstat()
    except OSError as error:
        raise EngineError(ErrorReason.INVALID_CONFIG, f"cannot make the run directory {base}: {error}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise EngineError(
            ErrorReason.INVALID_CONFIG,
            f"{base} must be a directory of this user with mode 0700; remove it or set XDG_RUNTIME_DIR.",
            path=str(base),
        )
