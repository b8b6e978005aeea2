"""Names the content of weight files cheaply: prefix caches and replays must not outlive a change of weights."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_DIGEST_CHARACTERS = 16


def content_digest(files: Iterable[tuple[Path, int]]) -> str:
    """Digest files by size, header and evenly spaced samples of the rest.

    Training moves every weight, so samples tell any two trained models apart; a change of a few bytes by hand between
    the samples goes unseen. Reading everything would cost seconds per gigabyte at each start.

    Args:
        files: Paths with the number of leading bytes that are digested whole.

    Returns:
        16 hexadecimal digits of a SHA-256, independent of paths and times.
    """
    digest = hashlib.sha256()
    for path, header_bytes in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}:{header_bytes}:".encode())
            digest.update(file.read(header_bytes))
            span = max(0, size - header_bytes - _SAMPLE_BYTES)
            for sample in range(_NUM_SAMPLES):
                file.seek(header_bytes + span * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:_DIGEST_CHARACTERS]
