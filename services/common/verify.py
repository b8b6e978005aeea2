"""The invariant switch: costly checks that are on in tests and may be turned off in production.

``assert`` is for what the type checker cannot know and is free; ``verify`` is for what costs. A violated invariant is
never repaired: it raises :class:`InvariantError` and the process stops. The idea is etcd's ``verify`` package.
"""

from collections.abc import Callable
from contextvars import ContextVar

from services.common.errors import InvariantError

_is_enabled: ContextVar[bool] = ContextVar("verify_is_enabled", default=False)


def set_verification(*, enabled: bool) -> None:
    """Switch costly checks on or off for this context and the tasks started from it."""
    _is_enabled.set(enabled)


def is_verification_enabled() -> bool:
    """Tell whether costly checks run."""
    return _is_enabled.get()


def verify(condition: Callable[[], bool], message: str, **details: object) -> None:
    """Check a costly invariant when verification is on.

    Args:
        condition: Evaluated only when verification is on.
        message: Static text that names the law.
        details: Values that show the violation.

    Raises:
        InvariantError: the condition is false.
    """
    if _is_enabled.get() and not condition():
        require(False, message, **details)


def require(condition: bool, message: str, **details: object) -> None:
    """Check a cheap invariant, always.

    Raises:
        InvariantError: the condition is false.
    """
    if not condition:
        text = ", ".join(f"{key}={value!r}" for key, value in details.items())
        raise InvariantError(f"{message} ({text})" if text else message, **{k: str(v) for k, v in details.items()})
