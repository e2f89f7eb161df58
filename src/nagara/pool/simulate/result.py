"""What one policy made of one world. Plain values."""

from dataclasses import dataclass, field

CHECK_S = 20.0  # boot checks of a simulated machine


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool at one minute, in machines."""

    at_s: float
    ready: int
    free: int
    held: int
    coming: int
    target: float  # machines planned for: held and reserve
    claims: int  # since the sample before
    misses: int


@dataclass(slots=True)
class Result:
    """Totals and, for the picture, samples."""

    policy: str
    claims: int = 0
    served_at_once: int = 0
    waited_s: list[float] = field(default_factory=list)  # of claims that were not
    never_served: int = 0
    paid_hours: float = 0.0
    held_hours: float = 0.0
    cost: float = 0.0
    solves: int = 0
    samples: list[Sample] = field(default_factory=list)

    @property
    def service(self) -> float:
        """Share of claims served at once."""
        return self.served_at_once / self.claims if self.claims else 1.0

    @property
    def idle_hours(self) -> float:
        """Machine hours paid for in which nothing was leased, boots included."""
        return self.paid_hours - self.held_hours

    def document(self) -> dict[str, object]:
        """For JSON."""
        waits = sorted(self.waited_s)
        return {
            "served_at_once": round(self.service, 5),
            "claims": self.claims,
            "missed": self.claims - self.served_at_once,
            "missed_wait_p50_s": round(waits[len(waits) // 2], 1) if waits else 0.0,
            "missed_wait_max_s": round(waits[-1], 1) if waits else 0.0,
            "never_served": self.never_served,
            "idle_machine_hours": round(self.idle_hours, 1),
            "machine_hours": round(self.paid_hours, 1),
            "utilisation": round(self.held_hours / self.paid_hours, 4) if self.paid_hours else 0.0,
            "cost": round(self.cost, 2),
        }
