"""The one way in which loading fails: a refusal that names the file and says what is wrong with it."""

from collections.abc import Iterable
from pathlib import Path

from services.common.errors import EngineError, ErrorReason

_MAX_LISTED = 5


def refusal(path: Path, problem: str) -> EngineError:
    """Build the MODEL_LOAD_FAILED error of ``path``, for the caller to raise."""
    return EngineError(ErrorReason.MODEL_LOAD_FAILED, f"{path}: {problem}", path=str(path))


def listed(items: Iterable[str]) -> str:
    """Join names for people; long lists are cut and say how much was."""
    names = list(items)
    surplus = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {surplus} more" if surplus > 0 else "")
