"""Offerings of many clouds from SkyPilot's catalogue: prices to plan with, nothing to launch.

The extra `skypilot` brings the package; its catalogue is files on this machine. Only list prices
are in it, never stock. Launching is for a `command` provider around the cloud's own tool.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nagara.contract.machine import (
    Offering,
    ProviderError,
    ProviderMachine,
    ProviderRefusedError,
    Resources,
)

Catalogue = Callable[[], Mapping[str, Iterable[Any]]]
_GIB = 2**30


class SkypilotProvider:
    """The catalogue as a provider without machines.

    Args:
        types: accelerators as the catalogue names them; empty: all.
        catalogue: gives, by accelerator, entries with SkyPilot's field names.
    """

    def __init__(
        self, name: str, types: tuple[str, ...] = (), catalogue: Catalogue | None = None
    ) -> None:
        self._name = name
        self._types = {one.lower() for one in types}
        self._catalogue = catalogue or _installed_catalogue

    @property
    def name(self) -> str:
        """As in `Offering.provider`; the clouds are in the regions: `aws/us-east-1`."""
        return self._name

    async def offerings(self) -> tuple[Offering, ...]:
        """Every priced entry, spot and on demand apart."""
        found: dict[str, Offering] = {}
        for accelerator, entries in self._catalogue().items():
            if not self._types or accelerator.lower() in self._types:
                for entry in entries:
                    for one in self._of(accelerator, entry):
                        found[one.id] = one
        return tuple(found.values())

    def _of(self, accelerator: str, entry: Any) -> Iterable[Offering]:
        cloud, region = str(entry.cloud).lower(), str(entry.region)
        kind = entry.instance_type or f"{accelerator}x{entry.accelerator_count:g}"
        for market, price in (("on-demand", entry.price), ("spot", entry.spot_price)):
            if price is None or not price > 0:  # the catalogue says NaN where it knows none
                continue
            yield Offering(
                id=f"{self._name}/{cloud}/{region}/{kind}/{market}",
                provider=self._name,
                region=f"{cloud}/{region}",
                type=accelerator.lower(),
                devices=max(1, int(entry.accelerator_count)),
                price_h=float(price),
                market=market,
                resources=_resources(entry),
            )

    async def launch(self, name: str, offering: Offering) -> None:
        """Refuses."""
        raise ProviderRefusedError(
            "offerings of a catalogue cannot be launched",
            where=offering.id,
            hint="use a `command` provider around the cloud's own tool",
        )

    async def release(self, name: str) -> None:
        """There is never anything to release."""

    async def machines(self) -> tuple[ProviderMachine, ...]:
        """None."""
        return ()


def _resources(entry: Any) -> Resources | None:
    cpu, memory = entry.cpu_count, entry.memory
    if not cpu or not memory or cpu != cpu or memory != memory:  # NaN
        return None
    return Resources(cpu=float(cpu), memory_bytes=int(memory * _GIB), disk_bytes=2**62)


def _installed_catalogue() -> Mapping[str, Iterable[Any]]:
    for module in ("sky.catalog", "sky.clouds.service_catalog"):
        try:
            catalogue = importlib.import_module(module)
        except ImportError:
            continue
        return dict(
            catalogue.list_accelerators(
                gpus_only=False, all_regions=True, require_price=True, case_sensitive=False
            )
        )
    raise ProviderError("SkyPilot is not installed", hint="pip install 'nagara[skypilot]'")
