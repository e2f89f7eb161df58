"""This machine: always there, at no cost; as the pool's own, or as a provider's only one."""

import json
import os
from dataclasses import replace
from pathlib import Path

from nagara.base.durable import write_durably
from nagara.contract.machine import (
    NoCapacityError,
    Offering,
    Presence,
    ProviderError,
    ProviderMachine,
    Resources,
)

NAME = "local"


def own_offering(slots: int, folder: Path) -> Offering:
    """What this machine offers as long as its own pool uses it: all of it, and no second one."""
    return Offering(
        id=NAME, provider=NAME, region=NAME, type="any", devices=slots, price_h=0.0,
        resources=_resources(folder), stock=0,
    )  # fmt: skip


class LocalProvider:
    """Lends this machine, once.

    Args:
        slots: replicas it may run at once.
        folder: where it is remembered under which name the machine was given out.
    """

    def __init__(self, slots: int, folder: Path) -> None:
        if slots < 1:
            raise ValueError("a machine needs at least one slot")
        self._slots = slots
        self._file = folder / "local-machine.json"

    @property
    def name(self) -> str:
        """As in `Offering.provider`."""
        return NAME

    async def offerings(self) -> tuple[Offering, ...]:
        """The one."""
        stock = 0 if self._given() else 1
        return (replace(own_offering(self._slots, self._file.parent), stock=stock),)

    async def launch(self, name: str, offering: Offering) -> None:
        """Gives the machine out under this name."""
        given = self._given()
        if given not in (None, name):
            raise NoCapacityError("this machine is there only once", where=offering.id)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._file, json.dumps({"name": name}).encode())

    async def release(self, name: str) -> None:
        """Takes it back; the machine itself runs on."""
        if self._given() == name:
            self._file.unlink(missing_ok=True)

    async def machines(self) -> tuple[ProviderMachine, ...]:
        """This machine, if it is given out."""
        given = self._given()
        return () if given is None else (ProviderMachine(given, NAME, Presence.RUNNING),)

    def _given(self) -> str | None:
        try:
            return str(json.loads(self._file.read_bytes())["name"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProviderError(
                "the note of this machine is not readable",
                where=str(self._file),
                hint="remove it if no nagara uses this machine",
            ) from error


def _resources(folder: Path) -> Resources:
    at = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    disk = os.statvfs(at)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Resources(
        cpu=float(len(os.sched_getaffinity(0))),
        memory_bytes=memory,
        disk_bytes=disk.f_blocks * disk.f_frsize,
    )
