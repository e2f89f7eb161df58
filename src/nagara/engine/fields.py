"""Typed values out of a JSON body, and a refusal of everything nobody asked for.

Pure. A parameter is read, or known to be neutral, or refused by name: never dropped in silence.
`null` counts as not given, as OpenAI's clients send it.
"""

import json
import math
from typing import Any

from nagara.engine.errors import RequestError

_ABSENT = object()


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        RequestError: not UTF-8, not JSON, or no object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:  # a number may be too long, too
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


class Fields:
    """The fields of one body, each taken once; `close` refuses the rest."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def any(self, name: str) -> Any:
        """The value as it came, or None."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} must be a string", where=name)
        return value

    def integer(self, name: str, default: int) -> int:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} must be an integer", where=name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} must be a number", where=name)
        if not math.isfinite(value):
            raise RequestError(f"{name} must be finite", where=name)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false", where=name)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """One string or a list of strings."""
        value = self._left.pop(name, ())
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise RequestError(f"{name} must be a string or a list of strings", where=name)
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._left.pop(name, ())
        if not is_ids(value) and value != ():
            raise RequestError(f"{name} must be a list of integers", where=name)
        return tuple(value)

    def only(self, name: str, *neutral: object) -> None:
        """Accept the field only with a value that asks for nothing."""
        value = self._left.pop(name, _ABSENT)
        if value is not _ABSENT and value not in neutral:
            raise RequestError(f"{name} is not supported by this server", where=name)

    def ignore(self, *names: str) -> None:
        """Fields that carry information about the caller and change no answer."""
        for name in names:
            self._left.pop(name, None)

    def close(self) -> None:
        for name in self._left:
            raise RequestError(f"unknown or unsupported parameter {name!r}", where=name)


def is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)
