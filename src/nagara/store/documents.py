"""JSON that comes from outside. Pure."""

import json
from typing import Any


def parse_json(raw: bytes | str) -> Any:
    """What the text says. Raises ValueError for anything that is no JSON.

    The parser itself raises more than that: text that is nested deeply ends its stack.
    """
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None
