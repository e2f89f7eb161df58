"""What a machine of its kind should have: devices as offered, and figures like the others' ones.

No table says how fast a kind of machine is: its own kind does, once enough of them were measured.
Pure.
"""

import re
from collections.abc import Set
from statistics import median

from nagara.contract.machine import HealthReport, Offering, Outcome
from nagara.pool.health.cuda import BANDWIDTH

SHARE, LEAST_OTHERS = 0.90, 3
_COMPARED = (BANDWIDTH,)
WITHOUT_DEVICES = ("any", "cpu")  # types of offerings
# Words of NVIDIA's product names that tell products apart: only these are looked for.
_PRODUCTS = frozenset({
    "p4", "p100", "v100", "t4", "a10", "a10g", "a16", "a30", "a40", "a100", "a2000", "a4000",
    "a5000", "a6000", "l4", "l40", "l40s", "h20", "h100", "h200", "h800", "gh200", "b100", "b200",
    "b300", "gb200", "gb300",
})  # fmt: skip


def unexpected(report: HealthReport, offering: Offering) -> str | None:
    """Devices that are missing, or are others than were offered; None: as offered."""
    if offering.type in WITHOUT_DEVICES:
        return None
    for result in report.results:
        if result.name != "devices" or result.outcome is not Outcome.PASS:
            continue
        if result.figure is not None and result.figure < offering.devices:
            return f"devices: {result.detail}, expected {offering.devices}"
        product = _words(offering.type) & _PRODUCTS
        if not product <= _words(result.detail):
            return f"devices: {result.detail}, expected {offering.type}"
    return None


class Kinds:
    """Figures of machines that passed, by device type."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str], dict[str, float]] = {}

    def below(self, machine: str, type_: str, report: HealthReport) -> str | None:
        """What is worse than on other machines of the type, or None."""
        for result in report.results:
            if result.name not in _COMPARED or result.figure is None:
                continue
            seen = self._figures.get((type_, result.name), {})
            others = [figure for name, figure in seen.items() if name != machine]
            if len(others) < LEAST_OTHERS:
                continue
            usual = median(others)
            if result.figure < SHARE * usual:
                return (
                    f"{result.name}: {result.detail}, less than {100 * SHARE:.0f} % of what "
                    f"others of type {type_} have ({usual:.1f})"
                )
        return None

    def note(self, machine: str, type_: str, report: HealthReport) -> None:
        """The machine passed: it is one that others are compared with."""
        for result in report.results:
            if result.name in _COMPARED and result.figure is not None:
                self._figures.setdefault((type_, result.name), {})[machine] = result.figure

    def keep(self, machines: Set[str]) -> None:
        """Forgets machines that are gone."""
        for seen in self._figures.values():
            for name in [name for name in seen if name not in machines]:
                del seen[name]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))
