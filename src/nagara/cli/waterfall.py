"""Draws where the time of starts went: one bar of stages each, on one scale, side by side.

A start is the document of the admin API: `kind, total_s, stages` (seconds, `unaccounted` among
them), `fallback`, `error`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nagara.base.spans import STAGES

_COLOURS = {
    "acquire": "magenta",
    "files": "blue",
    "host": "cyan",
    "device": "yellow",
    "canary": "green",
    "unaccounted": "bright_black",
}
_BAR_CELLS = 60


def waterfall(starts: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A table with a row a start; the longest start fills the bar."""
    longest_s = max((start["total_s"] for start in starts), default=0.0)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, justify in (("start", "left"), ("where the time went", "left"), ("total", "right")):
        table.add_column(column, justify="right" if justify == "right" else "left")
    for start in starts:
        name = start["kind"] or "failed"
        table.add_row(name, _bar(start["stages"], longest_s), _seconds(start["total_s"]))
    return Group(table, _legend(starts), *_remarks(starts))


def _bar(stages: Mapping[str, float], longest_s: float) -> Text:
    """Cells in proportion; a stage shorter than a cell is not drawn, but is in the legend."""
    bar = Text()
    done_s = 0.0
    drawn = 0
    for stage in (*STAGES, "unaccounted"):
        done_s += stages.get(stage, 0.0)
        until = round(done_s / longest_s * _BAR_CELLS) if longest_s else 0
        bar.append("█" * (until - drawn), style=_COLOURS[stage])
        drawn = max(drawn, until)
    return bar if bar.plain else Text("▏", style="bright_black")


def _legend(starts: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Seconds by stage, in the colours of the bars."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage")
    for start in starts:
        table.add_column(start["kind"] or "failed", justify="right")
    for stage in (*STAGES, "unaccounted"):
        name = Text("█ ", style=_COLOURS[stage]).append(stage, style="default")
        table.add_row(name, *(_seconds(start["stages"].get(stage, 0.0)) for start in starts))
    return table


def _remarks(starts: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Why a start was not a restored one, or failed."""
    remarks = []
    for start in starts:
        if start.get("error"):
            remarks.append(Text(f"{start['replica']} failed: {start['error']}", style="red"))
        elif start.get("fallback"):
            remarks.append(Text(f"why {start['kind']}: {start['fallback']}", style="dim"))
    return remarks


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
