"""Typed access to the fields of a decoded request: every refusal is an error that names the field.

Guarantees: strict types (a bool is no number, 5.0 is no integer), finite numbers, stated bounds; null means absent, as
OpenAI clients expect. Values are quoted in messages only in short form, so that no input can make an error costly.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from services.common.errors import EngineError, ErrorReason

SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields whose refusal is INVALID_SAMPLING_PARAMS; all others are INVALID_REQUEST."""

_MAX_SHOWN = 64
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def is_sane_id(text: str) -> bool:
    """Tell whether a client's id may be used in logs, headers and messages as it is."""
    return _SANE_ID.fullmatch(text) is not None


def invalid(field: str, problem: str) -> EngineError:
    """Build the refusal of a field.

    Args:
        field: Path of the field, such as ``messages[0].role``.
        problem: What is wrong and what would be right; follows the field's name.
    """
    reason = ErrorReason.INVALID_SAMPLING_PARAMS if field in SAMPLING_FIELDS else ErrorReason.INVALID_REQUEST
    return EngineError(reason, f"{field} {problem}.", field=field)


def unsupported(field: str, problem: str) -> EngineError:
    """Build the refusal of a field, or a value of it, that is known but not served."""
    return EngineError(ErrorReason.UNSUPPORTED_PARAMETER, f"{field} {problem}.", field=field)


def shown(value: object) -> str:
    """Describe a client's value for an error message; bounded in length, depth and time."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number beyond 64 bits"
    text = repr(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return text[:_MAX_SHOWN]


def is_int(value: object) -> TypeGuard[int]:
    """Tell whether a decoded value is an integer; bools are not."""
    return type(value) is int


def is_int_list(value: object) -> TypeGuard[list[int]]:
    """Tell whether a decoded value is a list of integers only."""
    return isinstance(value, list) and all(type(item) is int for item in value)


class FieldReader:
    """Reads one decoded object.

    Args:
        fields: The object.
        path: Prefix of its fields' names in errors, such as ``stream_options.``.
    """

    def __init__(self, fields: Mapping[str, object], path: str = "") -> None:
        self._fields = fields
        self._path = path

    def value(self, name: str) -> object:
        """Return a field as decoded; None when it is absent or null."""
        return self._fields.get(name)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return a bool.

        Raises:
            EngineError: INVALID_REQUEST, when it is anything else.
        """
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self._path + name, f"must be true or false, not {shown(value)}")
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        """Return an integer in ``[low, high]``, or None.

        Raises:
            EngineError: when it is no integer or out of bounds.
        """
        value = self.value(name)
        if value is None:
            return None
        if not is_int(value):
            raise invalid(self._path + name, f"must be an integer, not {shown(value)}")
        if not low <= value <= high:
            raise invalid(self._path + name, f"must be from {low} to {high}, not {shown(value)}")
        return value

    def number(self, name: str, *, low: float, high: float, is_low_allowed: bool = True) -> float | None:
        """Return a finite number in ``[low, high]`` or ``(low, high]``, or None.

        Raises:
            EngineError: when it is no number, not finite or out of bounds.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(self._path + name, f"must be a number, not {shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(self._path + name, "must be a finite number")
        if not low <= value <= high or (value == low and not is_low_allowed):
            bounds = f"from {low:g}" if is_low_allowed else f"above {low:g}"
            raise invalid(self._path + name, f"must be {bounds} up to {high:g}, not {shown(value)}")
        return float(value)

    def string(self, name: str, *, max_length: int) -> str | None:
        """Return a string of at most ``max_length`` characters, or None.

        Raises:
            EngineError: INVALID_REQUEST, when it is anything else.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(self._path + name, f"must be a string, not {shown(value)}")
        if len(value) > max_length:
            raise invalid(self._path + name, f"must have at most {max_length} characters, not {len(value)}")
        return value

    def identifier(self, name: str) -> str | None:
        """Return an id that is safe in logs and headers, or None.

        Raises:
            EngineError: INVALID_REQUEST, when it is no such id.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, str) or not is_sane_id(value):
            raise invalid(self._path + name, "must be 1 to 128 characters out of A-Z a-z 0-9 . _ : -")
        return value

    def nested(self, name: str) -> "FieldReader | None":
        """Return a reader of a nested object, or None.

        Raises:
            EngineError: INVALID_REQUEST, when it is anything else.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(self._path + name, f"must be an object, not {shown(value)}")
        return FieldReader(value, f"{self._path}{name}.")

    def string_map(self, name: str, *, max_entries: int, max_key: int, max_value: int) -> None:
        """Check an object of strings, if it is there.

        Raises:
            EngineError: INVALID_REQUEST, when it is anything else or beyond a limit.
        """
        value = self.value(name)
        if value is None:
            return
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise invalid(self._path + name, "must be an object whose values are strings")
        if len(value) > max_entries or any(len(k) > max_key or len(v) > max_value for k, v in value.items()):
            limits = f"{max_entries} entries, keys of {max_key} and values of {max_value} characters"
            raise invalid(self._path + name, f"must have at most {limits}")

    def neutral(self, name: str, values: Sequence[object]) -> None:
        """Accept a field that is not served only with a value that asks for nothing.

        Raises:
            EngineError: UNSUPPORTED_PARAMETER, for any other value.
        """
        value = self.value(name)
        if value is None or any(_is_same(value, neutral) for neutral in values):
            return
        if values:
            allowed = " or ".join(json.dumps(neutral) for neutral in values)
            raise unsupported(self._path + name, f"is not served yet except as {allowed}; got {shown(value)}")
        raise unsupported(self._path + name, "is not served yet; leave it out")


def _is_same(value: object, neutral: object) -> bool:
    """Compare without taking true for 1; integers and floats of one value are the same."""
    if isinstance(value, bool) != isinstance(neutral, bool):
        return False
    return value == neutral
