"""Sizes and durations as people write them: `8GiB`, `512MB`, `10m`, `1.5s`."""

import re

from nagara.base.errors import UsageError

_NUMBER_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SIZE_BYTES = {
    "": 1, "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_DURATION_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str) -> float:
    match = _NUMBER_UNIT.fullmatch(text)
    if match is None or match[2] not in units:
        allowed = ", ".join(unit for unit in units if unit)
        raise UsageError(f"{text!r} is not a {what}", hint=f"write a number and one of: {allowed}")
    return float(match[1]) * units[match[2]]


def parse_size_bytes(text: str) -> int:
    """`"8GiB"` → 8589934592. Raises `UsageError` naming the allowed units."""
    return int(_parse(text, _SIZE_BYTES, "size"))


def parse_duration_s(text: str) -> float:
    """`"10m"` → 600.0. Raises `UsageError` naming the allowed units."""
    return _parse(text, _DURATION_S, "duration")


def format_bytes(size_bytes: float) -> str:
    """`161 MB`: three significant digits in decimal units, as disks and links are sold."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
