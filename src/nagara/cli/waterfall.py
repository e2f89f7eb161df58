"""Draws where the time of starts went: one bar of stages each, on one scale, side by side.

A start is the document of the admin API: `kind, total_s, stages` (seconds, `unaccounted` among
them), `fallback`, `error`, `files`, `host` (the parts of the stage of that name).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nagara.base.spans import STAGES
from nagara.base.units import format_bytes
from nagara.cli.output import printable

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
        if stage == "host":
            _add_parts(table, starts)
    return table


def _add_parts(table: Table, starts: Sequence[Mapping[str, Any]]) -> None:
    """Rows of what the host stage of restored starts consists of."""
    parts = [start.get("host") or {} for start in starts]
    for name in dict.fromkeys(name for of_start in parts for name in of_start):
        shown = [_seconds(of_start[name]) if name in of_start else "" for of_start in parts]
        table.add_row(f"    {name}", *shown, style="dim")


def _remarks(starts: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Why a start was not a restored one, or failed; and what it read."""
    remarks = []
    for start in starts:
        if start.get("error"):
            remarks.append(
                Text(f"{start['replica']} failed: {printable(start['error'])}", style="red")
            )
        elif start.get("fallback"):
            remarks.append(
                Text(f"why {start['kind']}: {printable(start['fallback'])}", style="dim")
            )
    for start in starts:
        if files := start.get("files"):
            what = f"files of the {start['kind']} start: {files_line(files)}"
            remarks.append(Text(what, style="dim"))
    return remarks


_WAYS = {
    "local": "all on this machine",
    "lazy": "read through the file daemon",
    "tree": "read through one file system for the whole tree",
    "copy": "copied before the first start",
}


def files_line(files: Mapping[str, Any]) -> str:
    """How a start's files became visible and what it read of them, in a line."""
    weights = weights_line(files.get("weights"))
    if files["way"] == "host":
        return "this machine's own" + (f"; {weights}" if weights else "")
    parts = [
        f"{files['kind']} image, {files['objects']} objects, {format_bytes(files['size_bytes'])}, "
        + _WAYS[files["way"]]
    ]
    if files["read_objects"] is not None:
        share = files["read_bytes"] / max(files["size_bytes"], 1)
        parts.append(
            f"read {files['read_objects']} objects, {format_bytes(files['read_bytes'])} "
            f"({share:.0%})"
        )
    far = [tier for tier in files["tiers"] if tier["tier"] != "local"]
    parts += [
        f"{tier['objects']} objects, {format_bytes(tier['size_bytes'])} from {tier['tier']}"
        for tier in far
    ]
    if files["prefetched_objects"]:
        prefetched = format_bytes(files["prefetched_bytes"])
        parts.append(f"{files['prefetched_objects']} objects, {prefetched} ahead of need")
    if weights:
        parts.append(weights)
    return "; ".join(parts)


def weights_line(read: Mapping[str, Any] | None) -> str:
    """How fast weights came; empty where nobody said."""
    if not read:
        return ""
    rate = read["size_bytes"] / read["seconds"] / 1e9 if read["seconds"] else 0.0
    return f"weights {format_bytes(read['size_bytes'])} at {rate:.2f} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
