"""One machine makes a snapshot for all that can use it; others wait, or start plainly."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from nagara.contract.node import NodeUnavailableError
from nagara.contract.replica import CaptureOrder, CaptureReport, Lease, StartKind, StartReport
from nagara.control.app import App
from nagara.control.appfile import parse_apps
from nagara.control.captures import MAX_FAILURES, Captures
from nagara.control.service import Service
from nagara.control.telemetry import Telemetry
from nagara.control.zone import OWN
from nagara.testing.clock import JumpingClock

TEXT = '[app.smol]\nimage = "dir:/x"\ncommand = ["x"]\nport = 80\n'
CLASS = {OWN: "rich", "a": "rich", "b": "rich", "c": "poor"}


@dataclass
class World:
    """What captures are asked of, all in memory."""

    full: set[str] = field(default_factory=set)  # machines without a free slot
    made: list[str] = field(default_factory=list)  # on which machines
    outcome: CaptureReport = field(default_factory=lambda: CaptureReport("a snapshot"))
    going: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    # of Scopes
    def capture_scope(self, lease: Lease, image: str) -> tuple[str, str]:
        machine = lease.slot.partition("/")[0]
        return machine, CLASS[machine]

    def machines_of(self, scope: str) -> list[str]:
        return [machine for machine, its in CLASS.items() if its == scope]

    # of Supply
    def claim_spare(self, app: App, machine: str) -> Lease | None:
        return None if machine in self.full else Lease(f"{machine}/1", 1)

    def release(self, lease: Lease) -> None:
        pass

    async def durable(self) -> None:
        pass

    # of Node
    async def facts(self) -> Any:
        raise NodeUnavailableError("not reached yet")

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        self.made.append(order.lease.slot.partition("/")[0])
        await self.going.wait()
        return self.outcome

    async def stop(self, replica: str) -> None:
        pass

    # of State
    async def captures(self, *_: object) -> list[Any]:
        return []

    async def add_replica(self, *_: object, **__: object) -> None:
        pass

    async def set_replica(self, *_: object) -> None:
        pass

    async def add_capture(self, *_: object) -> None:
        pass

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Any:
        task = asyncio.create_task(work())
        self.tasks.append(task)
        return task


class Stand:
    def __init__(self) -> None:
        self.world = World()
        clock = JumpingClock()
        self.captures = Captures(
            *(cast('Any', self.world),) * 3,
            lambda app: (), clock, self.world.spawn, Telemetry(clock, None), self.world,
        )  # fmt: skip
        (app,) = parse_apps(TEXT, "x")
        self.service = Service(app, 1, cast("Any", None))

    def lacks(self, *machines: str) -> None:
        """Plain starts on these machines report that no snapshot fits."""
        for machine in machines:
            report = StartReport("r", StartKind.PLAIN, {}, 1.0, capture_wanted=True)
            lease = Lease(f"{machine}/0", 1)
            self.captures.started(self.service, self.service.app, report, lease)

    async def made(self) -> list[str]:
        """Where snapshots are made until nothing is to be made any more."""
        self.world.going.set()
        for _ in range(20):
            self.captures.tick()
            await asyncio.gather(*self.world.tasks)
            await asyncio.sleep(0)
        return self.world.made


@pytest.fixture
async def stand() -> Stand:
    return Stand()


async def test_machines_that_can_share_a_snapshot_make_one(stand: Stand) -> None:
    stand.lacks("a", "b", "a")
    stand.captures.tick()
    await asyncio.sleep(0)
    stand.lacks("b")  # meanwhile
    assert await stand.made() == ["a"]
    stand.lacks("b")  # its start had begun before
    assert await stand.made() == ["a"]
    assert stand.service.capture.state == "done"


async def test_a_machine_of_another_kind_gets_one_of_its_own(stand: Stand) -> None:
    stand.lacks("a")
    assert await stand.made() == ["a"]
    stand.lacks("c")
    assert await stand.made() == ["a", "c"]
    assert stand.service.capture.state == "done"


async def test_the_one_that_made_it_makes_another_when_it_is_lost(stand: Stand) -> None:
    stand.lacks("a")
    await stand.made()
    stand.lacks("a")
    assert await stand.made() == ["a", "a"]


async def test_one_of_its_kind_that_has_room_makes_it_for_a_machine_that_has_none(
    stand: Stand,
) -> None:
    stand.world.full = {"a", OWN}
    stand.lacks("a")
    assert await stand.made() == ["b"]


async def test_failures_on_one_kind_of_machine_do_not_count_for_another(stand: Stand) -> None:
    stand.lacks(OWN)
    await stand.made()
    stand.world.outcome = CaptureReport(None, "it cannot be saved")
    for _ in range(MAX_FAILURES + 2):
        stand.lacks("c")
        await stand.made()
    assert stand.world.made == [OWN, *["c"] * MAX_FAILURES]
    assert stand.service.capture.state == "done"
    await stand.captures.redeployed(stand.service, is_same=True)
    stand.world.outcome = CaptureReport("a snapshot")
    stand.lacks("c")
    assert (await stand.made())[-2:] == ["c", "c"]
