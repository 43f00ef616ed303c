"""Logs as JSON, one object a line, on standard error.

Every value is escaped by JSON, so that nothing that a client sends can start a line of its own or move a terminal's
cursor. No prompt, answer or key is ever given to a logger.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """One record, one line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        fields = record.__dict__.get("fields", {})
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**said, **fields}, default=str)


def log_as_json(level: str = "info") -> None:
    """Sends everything that Sightline and its HTTP library log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # What it says of its own start is said by ours.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """An event with its fields beside it, never within its text."""
    logger.log(level, event, extra={"fields": dict(fields)})
