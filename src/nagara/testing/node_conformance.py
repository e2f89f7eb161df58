"""What every `Node` must do, as tests.

Inherit from `NodeConformance` in a test module and provide a fixture `node`:

    class TestMyNode(NodeConformance):
        @pytest.fixture
        async def node(self): ...

The specs' commands run `nagara.testing.small_server`; a node that cannot run them overrides
`spec`. A node without processes recognises what it is to do by the app's name: `steady` serves,
`failing` prints "boom: no weights" and ends before it is ready, `slow` takes half a minute.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nagara.base.spans import STAGES
from nagara.contract.node import Node, NodeError, ReplicaGoneError, StartFailedError
from nagara.contract.replica import (
    Canary,
    CaptureOrder,
    Lease,
    ReplicaSpec,
    ReplicaStatus,
    StartKind,
    StartOrder,
)
from nagara.testing import small_server

_SERVER = str(Path(small_server.__file__).resolve())
_COMMANDS = {
    "steady": (sys.executable, _SERVER, "${PORT}"),
    "slow": (sys.executable, _SERVER, "${PORT}", "30"),
    "failing": (sys.executable, "-c", "print('boom: no weights', flush=True); raise SystemExit(3)"),
}
_LIMIT_S = 60.0


class NodeConformance:
    """The tests. One node per test, given up by the fixture afterwards."""

    def spec(self, app: str) -> ReplicaSpec:
        """What to run as `app`: "steady", "failing" or "slow"."""
        return ReplicaSpec(
            tenant="default",
            app=app,
            definition=f"conformance-{app}",
            image="host",
            command=_COMMANDS[app],
            port=8000,
            ready_path="/health",
            canary=Canary("/health"),
            start_timeout_s=_LIMIT_S,
        )

    def order(self, replica: str, app: str = "steady", number: int = 0) -> StartOrder:
        """Start `app` on slot `number`."""
        return StartOrder(replica, Lease(f"local-{number}", 1), self.spec(app))

    async def test_a_started_replica_answers_over_a_dialled_connection(self, node: Node) -> None:
        report = await node.start(self.order("steady-1"))
        assert report.replica == "steady-1"
        assert report.kind is StartKind.PLAIN
        assert report.elapsed_s >= 0
        assert set(report.stages) <= set(STAGES)
        assert await ask(node, "steady-1", "/health") == (200, b"ok")
        assert (await ask(node, "steady-1", "/other"))[0] == 404

    async def test_replicas_of_one_app_live_beside_each_other(self, node: Node) -> None:
        await asyncio.gather(*(node.start(self.order(f"steady-{n}", number=n)) for n in range(2)))
        for name in ("steady-0", "steady-1"):
            assert await ask(node, name, "/health") == (200, b"ok")
        await node.stop("steady-0")
        assert await ask(node, "steady-1", "/health") == (200, b"ok")

    async def test_a_running_replica_is_listed_with_its_lease(self, node: Node) -> None:
        await node.start(self.order("steady-1"))
        (status,) = await node.replicas()
        assert (status.replica, status.tenant, status.app) == ("steady-1", "default", "steady")
        assert status.definition == "conformance-steady"
        assert status.lease == Lease("local-0", 1)
        assert (status.ready, status.exit_code) == (True, None)

    async def test_a_stopped_replica_is_gone(self, node: Node) -> None:
        await node.start(self.order("steady-1"))
        await node.stop("steady-1", grace_s=1.0)
        assert await node.replicas() == ()
        with pytest.raises(ReplicaGoneError):
            await node.dial("steady-1")
        await node.stop("steady-1")

    async def test_stopping_what_is_not_there_is_no_error(self, node: Node) -> None:
        await node.stop("no-such-replica")

    async def test_dialling_what_is_not_there_says_so(self, node: Node) -> None:
        with pytest.raises(ReplicaGoneError):
            await node.dial("no-such-replica")

    async def test_a_command_that_fails_is_reported_with_what_it_said(self, node: Node) -> None:
        with pytest.raises(StartFailedError) as caught:
            await node.start(self.order("failing-1", "failing"))
        assert "boom: no weights" in str(caught.value)
        await node.stop("failing-1")
        assert await node.replicas() == ()
        assert b"boom: no weights" in await node.logs("failing-1")

    async def test_a_cancelled_start_leaves_nothing(self, node: Node) -> None:
        start = asyncio.create_task(node.start(self.order("slow-1", "slow")))
        await asyncio.sleep(0.5)
        assert not start.done()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

        async def is_gone() -> bool:
            return await node.replicas() == ()

        await _eventually(is_gone)
        with pytest.raises(ReplicaGoneError):
            await node.dial("slow-1")
        await node.start(self.order("steady-1"))
        assert await ask(node, "steady-1", "/health") == (200, b"ok")

    async def test_a_replica_that_ends_by_itself_is_told(self, node: Node) -> None:
        seen: list[ReplicaStatus] = []
        listening = asyncio.create_task(_collect(node, seen))
        try:
            for number, name in enumerate(("steady-1", "steady-2")):
                await node.start(self.order(name, number=number))
            await asyncio.sleep(0.1)
            await node.stop("steady-2")  # an end that was ordered is not told
            await ask(node, "steady-1", "/exit?code=7")

            async def is_seen() -> bool:
                return bool(seen)

            await _eventually(is_seen)
        finally:
            listening.cancel()
            await asyncio.wait((listening,))
        assert [(status.replica, status.exit_code) for status in seen] == [("steady-1", 7)]
        with pytest.raises((NodeError, ConnectionError)):
            (await node.dial("steady-1")).close()
        left = {status.replica: status for status in await node.replicas()}
        assert left.keys() <= {"steady-1"}
        assert all(not status.ready and status.exit_code == 7 for status in left.values())
        await node.stop("steady-1")
        assert await node.replicas() == ()

    async def test_logs_are_kept_and_cut_from_the_front(self, node: Node) -> None:
        await node.start(self.order("steady-1"))
        await ask(node, "steady-1", "/other")
        text = await node.logs("steady-1")
        assert b"ready" in text
        assert b"/other" in text
        assert len(await node.logs("steady-1", tail_bytes=5)) == 5
        await node.stop("steady-1")
        assert b"ready" in await node.logs("steady-1")
        with pytest.raises(ReplicaGoneError):
            await node.logs("no-such-replica")

    async def test_forgetting_an_app_that_was_never_here_is_no_error(self, node: Node) -> None:
        await node.forget_app("default", "no-such-app")

    async def test_a_capture_makes_later_starts_restored_ones(self, node: Node) -> None:
        facts = await node.facts()
        order = CaptureOrder("steady-capture", Lease("local-0", 1), self.spec("steady"))
        report = await node.capture(order)
        assert await node.replicas() == ()
        if not facts.can_snapshot:
            assert report.snapshot is None
            assert report.reason
            return
        assert report.snapshot, report.reason
        (saved,) = await node.snapshots()
        assert (saved.app, saved.snapshot) == ("steady", report.snapshot)
        assert saved.state == "good"
        assert saved.memory_bytes == report.memory_bytes
        assert (saved.misfit, saved.failures) == (None, 0)
        assert saved.cpu_flags
        started = await node.start(self.order("steady-1"))
        assert started.kind is StartKind.RESTORED, started.fallback
        assert not started.capture_wanted
        assert await ask(node, "steady-1", "/health") == (200, b"ok")
        await node.stop("steady-1")
        await node.forget_app("default", "steady")
        started = await node.start(self.order("steady-2"))
        assert started.kind is StartKind.PLAIN
        assert started.capture_wanted
        assert await node.snapshots() == ()

    async def test_what_ready_replicas_use_is_told_and_grows(self, node: Node) -> None:
        await node.start(self.order("steady-1"))
        first = {usage.replica: usage for usage in await node.usage()}
        assert first.keys() <= {"steady-1"}
        await ask(node, "steady-1", "/health")
        for second in await node.usage():
            assert second.at_s >= first["steady-1"].at_s
            assert second.cpu_s >= first["steady-1"].cpu_s > 0
            assert 0 < second.memory_bytes < second.memory_limit_bytes
            assert second.cores > 0
        await node.stop("steady-1")
        assert await node.usage() == ()

    async def test_caches_are_told_again_and_again(self, node: Node) -> None:
        for caches in (("http://127.0.0.1:9",), (), ()):
            assert await node.use_caches(caches) == await node.facts()

    async def test_facts(self, node: Node) -> None:
        facts = await node.facts()
        assert facts.machine
        assert facts.cores > 0
        assert facts.memory_bytes > 0
        assert facts.isolation in ("container", "process")


async def ask(node: Node, replica: str, path: str) -> tuple[int, bytes]:
    """GET over a fresh connection: (status, body)."""
    connected = await node.dial(replica)
    reader, writer = await asyncio.open_connection(sock=connected)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return int(head.split()[1]), body


async def _collect(node: Node, into: list[ReplicaStatus]) -> None:
    async for status in node.exits():
        into.append(status)  # noqa: PERF401 - read while it is filled


async def _eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not await condition():  # noqa: ASYNC110 - a node tells nobody of such changes
            await asyncio.sleep(0.02)
