"""Logs: one line an event, as text for people or as JSON for machines, always naming the service.

Guarantees: fields given as ``extra={"fields": {...}}`` appear in both forms; a line never contains a raw newline.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time_text = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = f"{time_text} {record.levelname.lower():7} {self._service:9} {record.getMessage()}"
        line = f"{line} {fields}" if fields else line
        if record.exc_info:
            line = f"{line} | {self.formatException(record.exc_info)}"
        return line.replace("\n", " ⏎ ")


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = record.__dict__.get("fields")
    return fields if isinstance(fields, dict) else {}


def set_up_logs(service: str, *, log_format: LogFormat, level: str) -> None:
    """Send every log record of this process to standard error in the chosen form.

    Args:
        service: Name that each line carries.
        log_format: ``text`` or ``json``.
        level: Name of the lowest level shown.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
