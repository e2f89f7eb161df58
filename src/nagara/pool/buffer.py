"""How many slots must be free so that claims find one: measured demand, and the quantile to hold.

Claims of one class are counted in windows of a minute. Their dispersion (variance over mean;
1 for independent arrivals, tens and more for real traffic) sets how far the reserve lies above
the mean over one refill. Pure: times are given, on a clock that never jumps.
"""

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist

WINDOW_S = 60.0
MEAN_HALF_LIFE_S = 1800.0
MEAN_AGE_S = MEAN_HALF_LIFE_S / math.log(2)  # of what the mean is made of
DISPERSION_HALF_LIFE_S = 86_400.0
PRIOR_DISPERSION = 20.0
_LEAST_WEIGHT = 0.2  # about ten minutes of measuring
_PRIOR_WINDOWS = 30.0


@dataclass(slots=True)
class ArrivalMeter:
    """Claims of one class, in windows.

    `mean` is of claims per window and follows within an hour; `dispersion` is of the deviations
    from it, over about a day.
    """

    started_s: float
    mean: float = 0.0
    _count: int = 0
    _window: int = 0
    _weight: float = 0.0  # how much of `mean` is measured rather than still empty
    _squares: float = PRIOR_DISPERSION * _PRIOR_WINDOWS
    _means: float = _PRIOR_WINDOWS

    def add(self, count: int, now_s: float) -> None:
        """`count` claims arrived now."""
        self.advance(now_s)
        self._count += count

    def to_document(self, now_s: float) -> dict[str, float]:
        """As JSON, in ages instead of readings of a clock."""
        document = asdict(self)
        del document["started_s"]
        return {**document, "age_s": now_s - self.started_s}

    @classmethod
    def from_document(cls, document: dict[str, float], now_s: float) -> "ArrivalMeter":
        """The inverse. Time in which nobody counted is left out: it says nothing of demand."""
        values = {name: value for name, value in document.items() if name != "age_s"}
        return cls(started_s=now_s - document["age_s"], **values)  # type: ignore[arg-type]

    def advance(self, now_s: float) -> None:
        """Closes the windows that are over."""
        window = int((now_s - self.started_s) // WINDOW_S)
        while self._window < window:
            if self._count == 0 and self.mean < 1e-9 and self._weight > 0.999:
                self._window = window  # nothing has happened for long; nothing changes
                break
            self._close()

    def _close(self) -> None:
        rate = self.rate()
        if self._weight > 0.05:
            kept = 0.5 ** (WINDOW_S / DISPERSION_HALF_LIFE_S)
            self._squares = self._squares * kept + (self._count - rate) ** 2
            self._means = self._means * kept + rate
        kept = 0.5 ** (WINDOW_S / MEAN_HALF_LIFE_S)
        self.mean = self.mean * kept + self._count * (1 - kept)
        self._weight = self._weight * kept + (1 - kept)
        self._count = 0
        self._window += 1

    def rate(self) -> float:
        """Claims per window, expected now. The first minutes are not taken for the whole."""
        return self.mean / max(self._weight, _LEAST_WEIGHT)

    @property
    def dispersion(self) -> float:
        """Variance over mean of claims per window, at least that of independent arrivals."""
        return max(1.0, self._squares / self._means) if self._means > 0 else 1.0


def reserve(arrivals: float, dispersion: float, service: float) -> float:
    """Slots that hold with probability `service` when `arrivals` are expected in one refill.

    `arrivals` + z·√(dispersion × arrivals), or the quantile of a gamma distribution of that mean
    and variance where it is larger: bursts lean to the right (Wilson and Hilferty's cube root).
    """
    if arrivals <= 0 or service <= 0:
        return 0.0
    z = NormalDist().inv_cdf(service)
    normal = arrivals + z * math.sqrt(dispersion * arrivals)
    shape = arrivals / dispersion
    if shape < 0.3:  # the cube root is no longer a good picture
        return max(normal, 0.0)
    root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))
    return max(0.0, normal, arrivals * max(root, 0.0) ** 3)
