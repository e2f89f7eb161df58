"""Machines by a person's own scripts: four commands, JSON in and JSON out.

    offerings   in: nothing                                  out: a list of offerings
    launch      in: {"name": ..., "offering": {...}}          out: not read
    release     in: {"name": ...}                             out: not read
    machines    in: nothing                                   out: a list of machines

A script ends with 0 when it did its work; `launch` with 75 when there is no such machine at
present and with 77 when a person has to do something first (quota, credentials): both mean that
certainly no machine was made. Any other end says nothing. `launch` with a name that is known
already makes no second machine; `release` of an unknown name ends with 0.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nagara.contract.machine import (
    NoCapacityError,
    Offering,
    Presence,
    ProviderError,
    ProviderMachine,
    ProviderRefusedError,
    Resources,
)

NO_CAPACITY, REFUSED = 75, 77  # EX_TEMPFAIL and EX_NOPERM of sysexits.h
LIMIT_S = 120.0
_SAID_CHARS = 500


class CommandProvider:
    """A provider behind four commands.

    Args:
        commands: by "offerings", "launch", "release", "machines": program and arguments.
        limit_s: time for one call; a script that takes longer is ended, its outcome unknown.
    """

    def __init__(
        self, name: str, commands: Mapping[str, Sequence[str]], *, limit_s: float = LIMIT_S
    ) -> None:
        self._name = name
        self._commands = commands
        self._limit_s = limit_s

    @property
    def name(self) -> str:
        """As in `Offering.provider`."""
        return self._name

    async def offerings(self) -> tuple[Offering, ...]:
        """What the script lists; ids get the provider's name in front."""
        return tuple(self._offering(one) for one in self._list(await self._call("offerings")))

    async def launch(self, name: str, offering: Offering) -> None:
        """Calls `launch`."""
        document = {**asdict(offering), "id": offering.id.removeprefix(f"{self._name}/")}
        await self._call("launch", {"name": name, "offering": document})

    async def release(self, name: str) -> None:
        """Calls `release`."""
        await self._call("release", {"name": name})

    async def machines(self) -> tuple[ProviderMachine, ...]:
        """What the script lists."""
        found = []
        for one in self._list(await self._call("machines")):
            try:
                found.append(
                    ProviderMachine(
                        name=str(one["name"]),
                        offering=f"{self._name}/{one['offering']}",
                        presence=Presence(one.get("presence", "running")),
                        address=str(one.get("address", "")),
                        problem=str(one.get("problem", "")),
                    )
                )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self._nonsense("machines", one, error) from error
        return tuple(found)

    def _offering(self, one: Any) -> Offering:
        try:
            resources = one.get("resources")
            return Offering(
                id=f"{self._name}/{one['id']}",
                provider=self._name,
                region=str(one["region"]),
                type=str(one["type"]),
                devices=int(one.get("devices", 1)),
                price_h=float(one["price_h"]),
                market=str(one.get("market", "on-demand")),
                resources=None if resources is None else Resources(**resources),
                stock=None if one.get("stock") is None else int(one["stock"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._nonsense("offerings", one, error) from error

    def _list(self, out: bytes) -> list[Any]:
        try:
            document = json.loads(out)
        except (ValueError, RecursionError) as error:
            raise self._nonsense("its answer", out[:_SAID_CHARS], error) from error
        if not isinstance(document, list):
            raise ProviderError("a script's answer is no JSON list", where=self._name)
        return document

    def _nonsense(self, what: str, given: object, error: Exception) -> ProviderError:
        return ProviderError(
            f"{what}: cannot use {str(given)[:_SAID_CHARS]} ({error!r})", where=self._name
        )

    async def _call(self, verb: str, document: dict[str, Any] | None = None) -> bytes:
        given = b"" if document is None else json.dumps(document).encode()
        command = self._commands[verb]
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise ProviderRefusedError(
                f"the script does not start: {error.strerror}", where=command[0]
            ) from error
        try:
            async with asyncio.timeout(self._limit_s):
                out, said = await child.communicate(given)
        except TimeoutError as error:
            raise ProviderError(
                f"{verb} took longer than {self._limit_s:g} s", where=command[0]
            ) from error
        finally:
            if child.returncode is None:
                child.kill()
                await asyncio.shield(child.wait())
        if child.returncode == 0:
            return out
        text = said.decode(errors="replace").strip()[-_SAID_CHARS:] or f"exit {child.returncode}"
        kinds = {NO_CAPACITY: NoCapacityError, REFUSED: ProviderRefusedError}
        kind = kinds.get(child.returncode or 0) if verb == "launch" else None
        raise (kind or ProviderError)(f"{verb}: {text}", where=command[0])
