"""The packed weights of a model in one file, mapped into memory by every worker that runs it.

Owns: where such files lie, what makes one valid, and how one comes about. Guarantees: a file appears under its name
only when it is whole (written beside it, synced, renamed), and what a process that was ended left behind goes when the
next one packs; its name says what it was made from, and a digest of every
tensor shows damage; whatever is wrong with one, the weights are packed anew. A file is never changed once it is there,
so maps of it stay valid when another takes its name.

Format: magic, length and digest of the header; the header, a JSON list with the SHA-256 of each tensor; padding to a
page; the tensors at the recipe's offsets.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.worker.native.recipe import PackedTensor, Recipe
from treadle_kernels.cpu import advise_huge_pages, aligned_bytes

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Packer = Callable[[Bytes], None]

_MAGIC = b"treadle packed 1"
_PREFIX = struct.Struct("<16sQ32s")
_PAGE = 4096
_NUM_DIGEST_THREADS = 4
_UNFINISHED = ".packing-"
"""How the name of a file begins that somebody works on, and has locked."""


class DamagedFileError(Exception):
    """A packed file is not what its name says; the text says why."""


def candidate_paths(model_path: Path, recipe: Recipe, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a model's packed file may lie, best first: beside the model, then in the user's cache. Pure."""
    directory, stem = (
        (model_path, model_path.resolve().name) if model_path.is_dir() else (model_path.parent, model_path.stem)
    )
    name = f"{stem}.{recipe.variant}.{recipe.fingerprint}.packed"
    if configured := environ.get("TREADLE_CACHE_DIR"):
        cache = Path(configured)
    else:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")) / ".cache") / "treadle"
    return directory / name, cache.expanduser() / "packed" / name


def open_or_pack(paths: tuple[Path, ...], recipe: Recipe, pack: Packer) -> Bytes:
    """Map the first valid file, or pack the weights and keep them in the first place that can be written.

    Args:
        paths: As `candidate_paths` gives them.
        recipe: What the file must hold.
        pack: Fills ``[recipe.num_bytes]`` zeroed bytes.

    Returns:
        ``[recipe.num_bytes]``, read-only: a map of the file, or memory where no place could be written.
    """
    for path in paths:
        try:
            return read_packed(path, recipe)
        except FileNotFoundError:
            continue
        except (OSError, DamagedFileError) as error:
            logger.warning("packed weights %s are unusable (%s); they are packed anew", path, error)
    for path in paths:
        try:
            write_packed(path, recipe, pack)
            return read_packed(path, recipe, is_trusted=True)
        except OSError as error:
            logger.info("packed weights cannot be kept in %s (%s)", path.parent, error)
    memory = aligned_bytes(recipe.num_bytes)
    pack(memory)
    return memory


def read_packed(path: Path, recipe: Recipe, *, is_trusted: bool = False) -> Bytes:
    """Map a file.

    Args:
        path: The file.
        recipe: What it must hold.
        is_trusted: Whether this process has just written it, so that its digests need not be checked.

    Raises:
        OSError: it is not there or cannot be read.
        DamagedFileError: it is not what the recipe makes.
    """
    with path.open("rb") as file:
        digests = _read_header(file.read(_header_bytes(recipe)), recipe)
        size = os.fstat(file.fileno()).st_size
        if size != _header_bytes(recipe) + recipe.num_bytes:
            raise DamagedFileError(f"it has {size:,} bytes")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        advise_huge_pages(content)
    data = np.frombuffer(content, dtype=np.uint8)[_header_bytes(recipe) :]
    if not is_trusted and (damaged := _differing(digests, _digests(recipe, data), recipe)):
        raise DamagedFileError(f"{damaged} is damaged")
    return data


def write_packed(path: Path, recipe: Recipe, pack: Packer) -> None:
    """Pack into a file, which appears whole or not at all; files that it supersedes are removed.

    Raises:
        OSError: the directory cannot be written, or has no room.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    descriptor, temporary_name = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
    temporary = Path(temporary_name)
    try:
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            num_bytes = _header_bytes(recipe) + recipe.num_bytes
            # A map of a file without room behind it kills the process when it is written to.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            content = mmap.mmap(file.fileno(), num_bytes)
            advise_huge_pages(content)
            data = np.frombuffer(content, dtype=np.uint8)[_header_bytes(recipe) :]
            pack(data)
            content[: _header_bytes(recipe)] = _header(recipe, _digests(recipe, data))
            content.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _remove_superseded(path)


def _remove_abandoned(directory: Path) -> None:
    """Remove unfinished files whose process has ended, and with it its lock."""
    for unfinished in directory.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError), unfinished.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unfinished.unlink()


def _remove_superseded(path: Path) -> None:
    """Remove what older weights or layouts left behind; who has such a file mapped keeps its content."""
    stem_and_variant = path.name.rsplit(".", 2)[0]
    for other in path.parent.iterdir():
        if other.suffix == ".packed" and other != path and other.name.rsplit(".", 2)[0] == stem_and_variant:
            other.unlink(missing_ok=True)


def _header_bytes(recipe: Recipe) -> int:
    """Bytes before the first tensor: each digest takes 64 characters and JSON's two quotes, comma and blank."""
    return -(-(_PREFIX.size + 2 + 68 * len(recipe.tensors)) // _PAGE) * _PAGE


def _header(recipe: Recipe, digests: list[str]) -> bytes:
    body = json.dumps(digests).encode()
    prefix = _PREFIX.pack(_MAGIC, len(body), hashlib.sha256(body).digest())
    return (prefix + body).ljust(_header_bytes(recipe), b"\x00")


def _read_header(header: bytes, recipe: Recipe) -> list[str]:
    if len(header) != _header_bytes(recipe):
        raise DamagedFileError("it ends inside its header")
    magic, length, digest = _PREFIX.unpack_from(header)
    if magic != _MAGIC:
        raise DamagedFileError("it is of another format")
    body = header[_PREFIX.size : _PREFIX.size + length]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedFileError("its header is damaged")
    return [str(item) for item in json.loads(body)]


def _digests(recipe: Recipe, data: Bytes) -> list[str]:
    def digest(tensor: PackedTensor) -> str:
        return hashlib.sha256(data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes].data).hexdigest()

    with ThreadPoolExecutor(_NUM_DIGEST_THREADS) as pool:
        return list(pool.map(digest, recipe.tensors))


def _differing(expected: list[str], found: list[str], recipe: Recipe) -> str | None:
    """Name the first tensor whose digest is another."""
    pairs = zip(recipe.tensors, expected, found, strict=True)
    return next((tensor.name for tensor, want, have in pairs if want != have), None)
