"""What the server counts and how it is written for Prometheus. Touched in the asyncio loop only."""

from dataclasses import dataclass, field

from nagara.engine.engine import EngineStats

# Upper ends of the time buckets, in seconds.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, as Prometheus wants them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        place = next((i for i, end in enumerate(BUCKETS_S) if seconds <= end), len(BUCKETS_S))
        self.counts[place] += 1
        self.total_s += seconds

    def lines(self, name: str, meaning: str) -> list[str]:
        out = [f"# HELP {name} {meaning}", f"# TYPE {name} histogram"]
        seen = 0
        for end, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            seen += count
            out.append(f'{name}_bucket{{le="{end}"}} {seen}')
        return [*out, f"{name}_sum {self.total_s:.6f}", f"{name}_count {seen}"]


@dataclass(slots=True)
class ServerMetrics:
    """Requests and tokens that went through this server."""

    requests: dict[str, int] = field(default_factory=dict)  # by HTTP status
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)

    def count_request(self, status: int) -> None:
        key = str(status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def text(self, stats: EngineStats) -> str:
        """The exposition format, https://prometheus.io/docs/instrumenting/exposition_formats/."""
        lines = [
            "# HELP nagara_engine_requests_total Requests answered, by HTTP status.",
            "# TYPE nagara_engine_requests_total counter",
            *(
                f'nagara_engine_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self.requests.items())
            ),
        ]
        for name, kind, meaning, value in self._values(stats):
            full = f"nagara_engine_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", f"{full} {value}"]
        lines += self.first_token.lines(
            "nagara_engine_first_token_seconds", "From a request's arrival to its first token."
        )
        lines += self.between_tokens.lines(
            "nagara_engine_between_tokens_seconds", "Between two pieces of one answer."
        )
        return "\n".join(lines) + "\n"

    def _values(self, s: EngineStats) -> list[tuple[str, str, str, float]]:
        return [
            ("prompt_tokens_total", "counter", "Prompt tokens taken in.", self.prompt_tokens),
            ("completion_tokens_total", "counter", "Tokens given out.", self.completion_tokens),
            ("steps_total", "counter", "Steps computed.", s.steps),
            ("rows_total", "counter", "Rows computed.", s.rows),
            ("preemptions_total", "counter", "Requests sent back to wait.", s.preemptions),
            ("running", "gauge", "Requests being computed.", s.running),
            ("waiting", "gauge", "Requests waiting for a place.", s.waiting),
            ("cache_blocks", "gauge", "Blocks of the KV cache.", s.cache_blocks),
            ("cache_blocks_held", "gauge", "Blocks held by requests.", s.cache_blocks_held),
            ("prefix_hit_ratio", "gauge", "Prompt tokens found cached.", s.prefix_hit_share),
            ("depth", "gauge", "Steps in flight; 1 means overlap is on.", s.depth),
            ("device_busy_ratio", "gauge", "Share of the time with work.", s.device_busy),
            ("host_seconds_per_step", "gauge", "Host work a step.", s.host_ms_per_step / 1e3),
            (
                "host_hidden_seconds_per_step",
                "gauge",
                "Host work a step while the device computed.",
                s.host_hidden_ms_per_step / 1e3,
            ),
            ("asleep", "gauge", "1 while the engine sleeps.", float(s.is_asleep)),
        ]
