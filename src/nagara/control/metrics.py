"""Counted and timed things of control, and Prometheus's text format. Pure but for its own sums.

Series exist for what has happened only: an app at zero that nobody called costs nothing. Changed
on the loop; `text` is called by the API.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

Labels = tuple[str, ...]


@dataclass(slots=True)
class Counter:
    """A number for each combination of labels that only grows."""

    name: str
    help: str
    labels: Sequence[str] = ()
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """One more."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def lines(self) -> Iterator[str]:
        """Its series."""
        yield from series(self.name, self.help, "counter", self.labels, self.values.items())


@dataclass(slots=True)
class _Bins:
    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True)
class Histogram:
    """How long something took, for each combination of labels. Seconds."""

    name: str
    help: str
    labels: Sequence[str] = ()
    bounds: Sequence[float] = SECONDS
    values: dict[Labels, _Bins] = field(default_factory=dict)

    def add(self, *labels: str, seconds: float) -> None:
        """One more."""
        bins = self.values.get(labels)
        if bins is None:
            bins = self.values[labels] = _Bins([0] * (len(self.bounds) + 1))
        bins.counts[bisect_left(self.bounds, seconds)] += 1
        bins.sum += seconds

    def lines(self) -> Iterator[str]:
        """Its series: cumulative buckets, sum and count."""
        yield from _head(self.name, self.help, "histogram")
        names = (*self.labels, "le")
        for labels, bins in self.values.items():
            total = 0
            for bound, count in zip((*self.bounds, "+Inf"), bins.counts, strict=True):
                total += count
                yield _line(f"{self.name}_bucket", names, (*labels, str(bound)), total)
            yield _line(f"{self.name}_sum", self.labels, labels, round(bins.sum, 6))
            yield _line(f"{self.name}_count", self.labels, labels, total)


class Metrics:
    """Everything that control counts while it runs."""

    def __init__(self) -> None:
        self.requests = Counter(
            "nagara_requests_total", "Answered requests, by the answer's status.", ("app", "status")
        )
        self.request_s = Histogram(
            "nagara_request_seconds", "From a request's arrival to the end of its answer.", ("app",)
        )
        self.queue_s = Histogram(
            "nagara_queue_seconds", "How long requests were held for a replica.", ("app",)
        )
        self.tokens = Counter("nagara_tokens_total", "Tokens of answers, as they pass.", ("app",))
        self.starts = Counter(
            "nagara_starts_total", "Starts, by how; `failed` came to nothing.", ("app", "kind")
        )
        self.start_s = Histogram(
            "nagara_start_seconds", "Starts that succeeded, as a whole.", ("app", "kind")
        )
        self.stage_s = Histogram(
            "nagara_start_stage_seconds", "Stages of starts that succeeded.", ("stage", "kind")
        )
        self.captures = Counter(
            "nagara_captures_total", "Attempts to make a snapshot.", ("app", "outcome")
        )
        self.decision_s = Histogram(
            "nagara_decision_seconds", "One round of scaling decisions over all apps."
        )

    def text(self) -> str:
        """All of them."""
        lines = [line for one in vars(self).values() for line in one.lines()]
        return "".join(f"{line}\n" for line in lines)


def series(
    name: str,
    help_: str,
    kind: str,
    labels: Sequence[str],
    values: Iterable[tuple[Labels, float]],
) -> Iterator[str]:
    """The lines of one metric; none at all without values."""
    is_first = True
    for own, value in values:
        if is_first:
            yield from _head(name, help_, kind)
            is_first = False
        yield _line(name, labels, own, value)


def gauges(name: str, help_: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
    """A present value for each of something."""
    yield from series(
        name, help_, "gauge", (label,), (((key,), value) for key, value in values.items())
    )


def _head(name: str, help_: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help_}"
    yield f"# TYPE {name} {kind}"


def _line(name: str, labels: Sequence[str], values: Sequence[str], value: float) -> str:
    pairs = ",".join(
        f'{label}="{_escaped(own)}"' for label, own in zip(labels, values, strict=True)
    )
    number = str(int(value)) if float(value).is_integer() else repr(float(value))
    return f"{name}{{{pairs}}} {number}" if pairs else f"{name} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
