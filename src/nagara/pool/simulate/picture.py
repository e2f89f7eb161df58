"""A run as a picture: machines ready, leased and planned for over time, and misses. Plain SVG.

Colours are told apart by those who see few, and the lines differ in dash as well.
"""

from collections.abc import Callable, Sequence
from html import escape

from nagara.pool.simulate.result import Result, Sample

WIDTH, HEIGHT = 1200, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 50, 40
_POINTS = 1200
_LINES: tuple[tuple[str, str, str, Callable[[Sample], float]], ...] = (
    ("ready (level)", "#0072b2", "", lambda one: one.ready),
    ("planned for (target)", "#e69f00", "6 4", lambda one: one.target),
    ("leased (demand)", "#009e73", "", lambda one: one.held),
    ("on their way", "#999999", "2 3", lambda one: one.coming),
)


def draw(result: Result, title: str) -> str:
    """The SVG's text."""
    samples = _thinned(result.samples)
    top = max((max(one.ready, one.target, one.held) for one in samples), default=1.0) or 1.0
    end_s = samples[-1].at_s if samples else 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="16">{escape(title)}</text>',
    ]
    parts += _axes(top, end_s)
    for number, (label, colour, dash, value) in enumerate(_LINES):
        points = " ".join(f"{_x(one.at_s, end_s):.1f},{_y(value(one), top):.1f}" for one in samples)
        style = f'fill="none" stroke="{colour}" stroke-width="1.3" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        x = _LEFT + number * 190
        parts.append(f'<line x1="{x}" y1="36" x2="{x + 24}" y2="36" {style}/>')
        parts.append(f'<text x="{x + 30}" y="40">{escape(label)}</text>')
    for one in samples:
        if one.misses:
            at = _x(one.at_s, end_s)
            size = min(12, 2 + one.misses)
            y = HEIGHT - _BOTTOM
            parts.append(
                f'<line x1="{at:.1f}" y1="{y}" x2="{at:.1f}" y2="{y - size}" stroke="#d55e00"/>'
            )
    x = _LEFT + len(_LINES) * 190
    parts.append(f'<text x="{x}" y="40" fill="#d55e00">| claims that waited</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """At most `_POINTS`, misses added up so that none is lost."""
    step = max(1, -(-len(samples) // _POINTS))
    thinned = []
    for begin in range(0, len(samples), step):
        part = samples[begin : begin + step]
        first = part[0]
        thinned.append(
            Sample(
                first.at_s, first.ready, first.free, first.held, first.coming, first.target,
                sum(one.claims for one in part), sum(one.misses for one in part),
            )
        )  # fmt: skip
    return thinned


def _x(at_s: float, end_s: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * at_s / (end_s or 1.0)


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top


def _axes(top: float, end_s: float) -> list[str]:
    parts = []
    for number in range(5):
        value = top * number / 4
        y = _y(value, top)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.0f}</text>')
    days = end_s / 86_400
    for day in range(int(days) + 1):
        x = _x(day * 86_400, end_s)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}">day {day + 1}</text>')
    return parts
