"""`nagara bench fleet`: what a thousand machines cost the control process (machines simulated).

The real control process with its state in SQLite; only what would be on other machines is made
up: providers, agents and nodes answer at once, from memory, in this process. What is measured is
how long it takes to decide, how late its loop gets to things, and how often the state is written.
"""

import asyncio
import resource
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from nagara.cli.bench_apps import decisions, highest
from nagara.cli.bench_report import print_json
from nagara.contract.machine import (
    CheckKind,
    HealthReport,
    NoCapacityError,
    Offering,
    Presence,
    ProviderMachine,
    Renewal,
    RenewalAnswer,
    Vitals,
)
from nagara.contract.node import ReplicaGoneError
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    DiskReport,
    ImageOrder,
    ImageReport,
    NodeFacts,
    ReplicaStatus,
    ReplicaUsage,
    SnapshotStatus,
    StartKind,
    StartOrder,
    StartReport,
)
from nagara.control.client import connect
from nagara.control.control import Control, Ready
from nagara.control.database import database_for
from nagara.control.pool_record import PoolRecord
from nagara.control.sqlite_database import SqliteDatabase
from nagara.pool.bootclock import BootClock
from nagara.pool.machines import MachineRow, Writes
from nagara.pool.setup import PoolSetup
from nagara.pool.states import MachineState

_APPS = 50
_DEVICES = 8
_SLEEP_S, _SETTLE_S = 0.02, 2.0
_KIND = Offering("rack/m", "rack", "rack", "cpu", _DEVICES, 0.0, stock=0)


@click.command()
@click.option(
    "--machines", default=1000, show_default=True, type=click.IntRange(min=1),
    help="How many there are, of 8 slots each.",
)  # fmt: skip
@click.option(
    "--replicas", default=5000, show_default=True, type=click.IntRange(min=_APPS),
    help="How many run on them, of 50 apps.",
)  # fmt: skip
@click.option(
    "--seconds", default=30.0, show_default=True, type=click.FloatRange(min=2.0),
    help="How long the fleet is watched once all replicas are ready.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fleet(machines: int, replicas: int, seconds: float, as_json: bool) -> None:
    """Measure the control process with many machines and replicas, which are simulated."""
    if replicas > machines * _DEVICES:
        raise click.UsageError(f"a machine has {_DEVICES} slots: that is too many replicas")
    figures = fleet_figures(machines, replicas, seconds)
    if as_json:
        print_json(figures)
        return
    click.echo(
        f"{machines} machines, {replicas} replicas (simulated): all ready after "
        f"{figures['all_ready_s']:.1f} s; then a round of decisions "
        f"{figures['decision_mean_ms']:.1f} ms (the slowest under "
        f"{figures['decision_max_ms']:g} ms), the loop {figures['loop_late_max_ms']:.0f} ms late "
        f"at most (p99 {figures['loop_late_p99_ms']:.0f} ms), {figures['commits_per_s']:.1f} state "
        f"transactions a second ({figures['commits_per_start']:.1f} for a start), "
        f"{100 * figures['cpu']:.0f} % of a core"
    )


def fleet_figures(machines: int, replicas: int, seconds: float) -> dict[str, Any]:
    """The figures of one run, in a folder of its own that is removed."""
    with tempfile.TemporaryDirectory(prefix="nagara-fleet-") as folder:
        return asyncio.run(_measured(Path(folder), machines, replicas, seconds))


@dataclass(slots=True)
class _Rack:
    """A provider whose machines were all launched earlier."""

    names: Sequence[str]
    name: str = "rack"

    async def offerings(self) -> tuple[Offering, ...]:
        return (_KIND,)

    async def launch(self, name: str, offering: Offering) -> None:
        raise NoCapacityError("the simulated rack is full", where=offering.id)

    async def release(self, name: str) -> None:
        return

    async def machines(self) -> tuple[ProviderMachine, ...]:
        return tuple(
            ProviderMachine(name, _KIND.id, Presence.RUNNING, f"sim:{name}") for name in self.names
        )


class _Agent:
    """A machine that is well."""

    async def check(self, kind: CheckKind) -> HealthReport:
        return HealthReport(kind, ())

    async def vitals(self, heard: str) -> Vitals:
        return Vitals(int(time.monotonic()), (), ())

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        return RenewalAnswer(BootClock().monotonic_s())

    async def fence(self, slot: str, epoch: int) -> None:
        return


@dataclass(slots=True)
class _Node:
    """The node of one simulated machine: replicas are ready at once."""

    running: dict[str, ReplicaStatus] = field(default_factory=dict)

    async def facts(self) -> NodeFacts:
        return NodeFacts("simulated", 1, 1 << 30, "process", can_snapshot=False)

    async def use_caches(self, caches: tuple[str, ...]) -> NodeFacts:
        return await self.facts()

    async def bring_image(self, order: ImageOrder) -> ImageReport:
        return ImageReport("simulated", files=1, size_bytes=1, new_bytes=0)

    async def start(self, order: StartOrder) -> StartReport:
        spec = order.spec
        self.running[order.replica] = ReplicaStatus(
            order.replica, spec.tenant, spec.app, spec.definition, order.lease, ready=True
        )
        return StartReport(order.replica, StartKind.PLAIN, {"host": 0.0}, 0.0)

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        return CaptureReport(None, "simulated")

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        self.running.pop(replica, None)

    async def dial(self, replica: str) -> socket.socket:
        raise ReplicaGoneError("simulated replicas take no connections", where=replica)

    async def replicas(self) -> tuple[ReplicaStatus, ...]:
        return tuple(self.running.values())

    async def usage(self) -> tuple[ReplicaUsage, ...]:
        return ()

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        return ()

    async def disk(self) -> DiskReport:
        return DiskReport(None, ())

    async def exits(self) -> AsyncIterator[ReplicaStatus]:
        await asyncio.get_running_loop().create_future()
        yield  # type: ignore[misc]  # none ever ends by itself

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        return b""

    async def forget_app(self, tenant: str, app: str) -> None:
        return


async def _measured(folder: Path, machines: int, replicas: int, seconds: float) -> dict[str, Any]:
    names = await _launched(folder, machines)
    nodes = {f"sim:{name}": _Node() for name in names}
    pool = PoolSetup(
        None, lambda name, address: _Agent(), (_Rack(names),), required=lambda _: frozenset()
    )
    control = Control(folder, _Node(), pool, nodes=nodes.__getitem__, drain_s=0.0)
    is_up = asyncio.Event()

    def ready(told: Ready) -> None:
        is_up.set()

    running = asyncio.create_task(control.run(ready, app_file=(_apps(replicas), "fleet")))
    waiting = asyncio.create_task(is_up.wait())
    try:
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        begun_s = time.perf_counter()
        # The real time of it is the figure.
        while sum(len(node.running) for node in nodes.values()) < replicas:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        all_ready_s = time.perf_counter() - begun_s
        await asyncio.sleep(_SETTLE_S)
        database = control.database
        assert isinstance(database, SqliteDatabase)
        commits = database.commits
        watched = await _watched(folder, control, seconds)
    finally:
        waiting.cancel()
        control.stop(keep=True)
        await running
    return {
        "simulated": True, "machines": machines, "replicas": replicas,
        "all_ready_s": round(all_ready_s, 2),
        "commits_per_start": round(commits / replicas, 2), **watched,
    }  # fmt: skip


async def _launched(folder: Path, machines: int) -> list[str]:
    """A record of machines that an earlier process would have left."""
    database = database_for(folder, None)
    await database.open()
    record = PoolRecord(database)
    prefix = (await record.read()).pool
    names = [f"{prefix}-{number:05d}{secrets.token_hex(2)}" for number in range(machines)]
    rows = tuple(
        MachineRow(name, _KIND, MachineState.READY, 5, "", f"sim:{name}", None) for name in names
    )
    await record.write(Writes(machines=rows))
    await database.close()
    return names


def _apps(replicas: int) -> str:
    share, rest = divmod(replicas, _APPS)
    return "".join(
        f'[app.app-{number}]\nimage = "host"\ncommand = ["serve"]\nsnapshot = false\n'
        f"scale = {{min = {count}, max = {count}}}\n"
        for number in range(_APPS)
        if (count := share + (number < rest))
    )


async def _watched(folder: Path, control: Control, seconds: float) -> dict[str, Any]:
    """Decisions, lateness, transactions and processor time of so many seconds."""
    admin = connect(folder)
    database = control.database
    assert isinstance(database, SqliteDatabase)
    before = decisions(await asyncio.to_thread(admin.metrics))
    commits, cpu_s, begun_s = database.commits, _cpu_s(), time.perf_counter()
    late_s = []
    while (now_s := time.perf_counter()) < begun_s + seconds:
        await asyncio.sleep(_SLEEP_S)
        late_s.append(time.perf_counter() - now_s - _SLEEP_S)
    elapsed_s = time.perf_counter() - begun_s
    commits, cpu_s = database.commits - commits, _cpu_s() - cpu_s
    after = decisions(await asyncio.to_thread(admin.metrics))
    rounds = after["count"] - before["count"]
    late_s.sort()
    return {
        "decisions": int(rounds),
        "decision_mean_ms": round(1000 * (after["sum"] - before["sum"]) / max(1, rounds), 2),
        "decision_max_ms": 1000 * highest(before["bins"], after["bins"]),
        "loop_late_p99_ms": round(1000 * late_s[int(len(late_s) * 0.99)], 1),
        "loop_late_max_ms": round(1000 * late_s[-1], 1),
        "commits_per_s": round(commits / elapsed_s, 2),
        "cpu": round(cpu_s / elapsed_s, 3),
        "rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
