"""What an API key, or all keys of a tenant, may do: which apps, how often, how many at once.

Pure; times are given.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nagara.control.refusal import Refusal, bad_request

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The bounds of one key; None or empty is no bound."""

    apps: tuple[str, ...] = ()
    per_minute: int | None = None
    concurrency: int | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


NO_LIMITS = KeyLimits()


def limits_from(query: Mapping[str, str]) -> KeyLimits:
    """From `apps=a,b`, `per_minute=N` and `concurrency=N`.

    Raises:
        Refusal: one of them is no such thing.
    """
    apps = tuple(name for name in query.get("apps", "").split(",") if name)
    return KeyLimits(apps, _number(query, "per_minute"), _number(query, "concurrency"))


def limits_of(values: Mapping[str, Any]) -> KeyLimits:
    """What `KeyLimits.document` gave."""
    return KeyLimits(
        tuple(values.get("apps", ())), values.get("per_minute"), values.get("concurrency")
    )


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text[:10]) > 0 and len(text) < 10):
        raise bad_request(f"{name} must be a number above zero")
    return int(text)


@dataclass(slots=True)
class KeyUse:
    """What a key has been used for: a bucket of requests that fills again, and those running.

    Args:
        whose: "key", or "tenant" for all keys of one together.
    """

    limits: KeyLimits
    whose: str = "key"
    running: int = 0
    left: float = field(init=False)
    filled_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.left = float(self.limits.per_minute or 0)

    def begin(self, app: str, now_s: float) -> None:
        """One more request.

        Raises:
            Refusal: 403 for an app that is not the key's, 429 for too many.
        """
        limits = self.limits
        if limits.apps and app not in limits.apps:
            raise Refusal(403, f"this key is not for the app {app!r}", code="not_this_key")
        if limits.concurrency is not None and self.running >= limits.concurrency:
            raise Refusal(
                429, f"this {self.whose} may have {limits.concurrency} requests at once",
                code=f"{self.whose}_concurrency", retry_after_s=1.0,
            )  # fmt: skip
        if limits.per_minute is not None:
            self._fill(limits.per_minute, now_s)
            if self.left < 1.0:
                raise Refusal(
                    429, f"this {self.whose} may have {limits.per_minute} requests a minute",
                    code=f"{self.whose}_rate",
                    retry_after_s=(1.0 - self.left) * _MINUTE_S / limits.per_minute,
                )  # fmt: skip
            self.left -= 1.0
        self.running += 1

    def end(self) -> None:
        """One of its requests has ended."""
        self.running -= 1

    def _fill(self, per_minute: int, now_s: float) -> None:
        passed_s = max(0.0, now_s - self.filled_s)
        self.left = min(float(per_minute), self.left + passed_s * per_minute / _MINUTE_S)
        self.filled_s = now_s
