"""JSON that comes from outside. Pure."""

import json
import math
from typing import Any


def parse_json(raw: bytes | str) -> Any:
    """What the text says. Raises ValueError for anything that is no JSON.

    The parser itself raises more than that: text that is nested deeply ends its stack. And it takes
    more than that: numbers that are none, and some that become infinite.
    """
    try:
        return json.loads(raw, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number
