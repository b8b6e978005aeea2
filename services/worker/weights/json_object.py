"""Typed access to a JSON file whose content nobody has checked yet."""

import json
from pathlib import Path
from typing import Self, TypeGuard

from services.worker.weights.refusal import refusal


class JsonObject:
    """An object in a JSON file. Getters return None for absent and null, and raise for a value of another type.

    Args:
        path: The file, for error texts.
        fields: The parsed object.
        place: Where in the file the object is, for error texts; ends with a dot unless empty.
    """

    def __init__(self, path: Path, fields: dict[str, object], place: str = "") -> None:
        self.path = path
        self._fields = fields
        self._place = place

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that holds one object.

        Raises:
            EngineError: MODEL_LOAD_FAILED, when it cannot be read or is something else.
        """
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise refusal(path, f"cannot be read as JSON ({error})") from error
        if not isinstance(parsed, dict):
            raise refusal(path, "should hold a JSON object")
        return cls(path, parsed)

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def integer(self, key: str) -> int | None:
        """Read an integer."""
        value = self._fields.get(key)
        if value is None or _is_integer(value):
            return value
        raise self._wrong(key, "an integer")

    def required_integer(self, key: str) -> int:
        """Read an integer that must be there."""
        value = self.integer(key)
        if value is None:
            raise refusal(self.path, f"{self._place}{key} is missing")
        return value

    def number(self, key: str) -> float | None:
        """Read a number."""
        value = self._fields.get(key)
        if value is None:
            return None
        if isinstance(value, float) or _is_integer(value):
            return float(value)
        raise self._wrong(key, "a number")

    def boolean(self, key: str) -> bool | None:
        """Read a boolean."""
        value = self._fields.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def string(self, key: str) -> str | None:
        """Read a string."""
        value = self._fields.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, "a string")

    def strings(self, key: str) -> list[str]:
        """Read a list of strings; absent is empty."""
        value = self._fields.get(key)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise self._wrong(key, "a list of strings")

    def integers(self, key: str) -> list[int]:
        """Read one integer or a list of them; absent is empty."""
        value = self._fields.get(key)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        integers = [item for item in items if _is_integer(item)]
        if len(integers) == len(items):
            return integers
        raise self._wrong(key, "an integer or a list of integers")

    def child(self, key: str) -> "JsonObject | None":
        """Read an object."""
        value = self._fields.get(key)
        if value is None:
            return None
        if isinstance(value, dict):
            return JsonObject(self.path, value, f"{self._place}{key}.")
        raise self._wrong(key, "an object")

    def string_by_key(self) -> dict[str, str]:
        """Read the whole object as a map of strings."""
        return {key: self.string(key) or "" for key in self._fields}

    def _wrong(self, key: str, wanted: str) -> Exception:
        return refusal(self.path, f"{self._place}{key} should be {wanted}, is {json.dumps(self._fields[key])[:80]}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
