"""NVIDIA's Xid codes: found in kernel log lines, judged by the table beside this file.

The table is data with its source in its head; a code it does not know warns and keeps the
machine from new leases.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

from nagara.contract.machine import DeviceEvent

_LINE = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): (?P<code>\d+)\b(?P<text>.*)"
)


class Action(StrEnum):
    """What the pool does, from nothing to everything."""

    IGNORE = "ignore"
    WARN = "warn"
    KEEP_OUT = "keep_out"
    DRAIN = "drain"
    REMOVE = "remove"


_ORDER = list(Action)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an event means."""

    action: Action
    cause: str
    is_known: bool


class XidPolicy:
    """The table."""

    def __init__(self, text: str | None = None) -> None:
        if text is None:
            text = resources.files(__package__).joinpath("xid.toml").read_text()
        document = tomllib.loads(text)
        self.source = str(document["source"])
        self._codes = {
            int(code): Judgement(Action(one["action"]), str(one["cause"]), is_known=True)
            for code, one in document["codes"].items()
        }

    def judge(self, code: int) -> Judgement:
        """What the code means."""
        unknown = Judgement(Action.KEEP_OUT, f"Xid {code} is not in the table", is_known=False)
        return self._codes.get(code, unknown)

    def worst(self, events: Iterable[DeviceEvent]) -> tuple[DeviceEvent, Judgement] | None:
        """The event that asks for most, or None."""
        judged = [(event, self.judge(event.code)) for event in events]
        return max(judged, key=lambda one: _ORDER.index(one[1].action), default=None)


def find_xids(log: Iterable[str]) -> list[DeviceEvent]:
    """The Xid events in lines of the kernel log."""
    found = []
    for line in log:
        match = _LINE.search(line)
        if match:
            text = match["text"].lstrip(", ").strip()
            found.append(DeviceEvent(int(match["code"]), match["device"], text))
    return found
