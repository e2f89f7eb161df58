"""Log records as JSON, one object a line."""

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """`time`, `level`, `logger`, `message`, and what a record carries as `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        at = datetime.fromtimestamp(record.created, UTC)
        document = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)
