"""Logs in JSON, one object per line, on standard error.

JSON escapes every value, so that nothing that a client sends can start a new line or send control codes to a terminal.
Prompts, answers and keys are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

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
    """Sends the logs of Sightline and its HTTP library to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Its messages about starting and stopping repeat ours.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Logs an event. Its values go into separate fields, never into the message."""
    logger.log(level, event, extra={"fields": dict(fields)})
