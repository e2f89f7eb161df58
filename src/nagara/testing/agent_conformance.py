"""What every way to an agent must do, as tests: calls, and the bytes of dialled replicas.

Inherit from `AgentConformance` in a test module and provide a fixture `reach`: an asynchronous
function that offers a node and gives back the node at the far end.

    class TestMyWay(AgentConformance):
        @pytest.fixture
        async def reach(self): ...
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from nagara.contract.node import Node, ReplicaGoneError, StartFailedError
from nagara.contract.replica import Canary, Lease, ReplicaSpec, ReplicaStatus, StartOrder
from nagara.testing.fake_node import FakeNode

Reach = Callable[[Node], Awaitable[Node]]

_LIMIT_S = 60.0
_MIB = 1 << 20


class BareNode(FakeNode):
    """A node whose one replica, "bare", is a listening socket in the hands of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self._address = self.server.getsockname()

    async def dial(self, replica: str) -> socket.socket:
        """A connection to the test."""
        if replica != "bare":
            return await super().dial(replica)
        dialled = socket.socket()
        dialled.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(dialled, self._address)
        except BaseException:
            dialled.close()
            raise
        return dialled

    async def close(self) -> None:
        self.server.close()
        await super().close()


class Dialled:
    """Both ends of one connection: the caller's, and the replica's."""

    def __init__(self, caller: socket.socket, replica: socket.socket) -> None:
        self.caller = caller
        self.replica = replica


class AgentConformance:
    """The tests."""

    @pytest.fixture
    async def bare(self) -> AsyncIterator[BareNode]:
        node = BareNode()
        yield node
        await node.close()

    @pytest.fixture
    async def ends(self, bare: BareNode, reach: Reach) -> AsyncIterator[Dialled]:
        far = await reach(bare)
        async with asyncio.timeout(_LIMIT_S):
            caller = await far.dial("bare")
            replica, _ = await asyncio.get_running_loop().sock_accept(bare.server)
        replica.setblocking(False)
        yield Dialled(caller, replica)
        for end in (caller, replica):
            end.close()

    # -- bytes -----------------------------------------------------------------------------

    async def test_a_dialled_socket_does_not_block(self, ends: Dialled) -> None:
        assert ends.caller.getblocking() is False

    async def test_bytes_go_both_ways_at_once(self, ends: Dialled) -> None:
        up, down = bytes(range(256)) * 20_000, bytes(reversed(range(256))) * 20_000
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(send_all(ends.caller, up))
            group.create_task(send_all(ends.replica, down))
            at_replica = group.create_task(read_all(ends.replica))
            at_caller = group.create_task(read_all(ends.caller))
        assert at_replica.result() == up
        assert at_caller.result() == down

    async def test_a_replica_may_speak_first(self, ends: Dialled) -> None:
        await asyncio.get_running_loop().sock_sendall(ends.replica, b"220 hello\r\n")
        assert await read_some(ends.caller) == b"220 hello\r\n"

    async def test_an_end_of_one_direction_leaves_the_other(self, ends: Dialled) -> None:
        loop = asyncio.get_running_loop()
        await send_all(ends.caller, b"question")
        assert await read_all(ends.replica) == b"question"
        for part in (b"an answer ", b"in parts"):
            await loop.sock_sendall(ends.replica, part)
            assert await read_some(ends.caller) == part
        await send_all(ends.replica, b"")
        assert await read_all(ends.caller) == b""

    async def test_the_replica_may_end_its_direction_first(self, ends: Dialled) -> None:
        await send_all(ends.replica, b"take this")
        assert await read_all(ends.caller) == b"take this"
        await send_all(ends.caller, b"and you that")
        assert await read_all(ends.replica) == b"and you that"

    async def test_who_does_not_read_stops_the_writer(self, ends: Dialled) -> None:
        for writer, reader in ((ends.caller, ends.replica), (ends.replica, ends.caller)):
            sent = await fill(writer)
            assert sent < 64 * _MIB
            received = 0
            async with asyncio.timeout(_LIMIT_S):
                while received < sent:
                    received += len(await read_some(reader))
            assert received == sent

    async def test_a_replica_that_breaks_off_is_an_error_and_no_end(self, ends: Dialled) -> None:
        await asyncio.get_running_loop().sock_sendall(ends.replica, b"half an ans")
        assert await read_some(ends.caller) == b"half an ans"
        ends.replica.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        ends.replica.close()
        with pytest.raises(ConnectionError):
            await read_some(ends.caller)

    async def test_a_caller_that_leaves_is_noticed_by_the_replica(self, ends: Dialled) -> None:
        ends.caller.close()
        assert await read_some(ends.replica) == b""

        async def go_on() -> None:
            while True:
                await asyncio.get_running_loop().sock_sendall(ends.replica, b"anybody?")
                await asyncio.sleep(0.01)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(go_on(), _LIMIT_S)

    async def test_many_connections_do_not_disturb_each_other(
        self, bare: BareNode, reach: Reach
    ) -> None:
        far = await reach(bare)
        loop = asyncio.get_running_loop()

        async def echo() -> None:
            for _ in range(40):
                opened, _ = await loop.sock_accept(bare.server)
                opened.setblocking(False)
                group.create_task(_echo(opened))

        async def ask(number: int) -> bytes:
            with await far.dial("bare") as dialled:
                await send_all(dialled, b"%d" % number)
                return await read_all(dialled)

        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(echo())
            asked = [group.create_task(ask(number)) for number in range(40)]
        assert [one.result() for one in asked] == [b"%d" % number for number in range(40)]

    # -- calls -----------------------------------------------------------------------------

    async def test_calls_follow_each_other(self, bare: BareNode, reach: Reach) -> None:
        far = await reach(bare)
        for _ in range(3):
            assert (await far.facts()).machine == "fake"
            assert await far.replicas() == ()
            with pytest.raises(ReplicaGoneError, match="no such replica"):
                await far.dial("nobody")

    async def test_errors_keep_their_kind_and_words(self, bare: BareNode, reach: Reach) -> None:
        far = await reach(bare)
        bare.scripts["app"].always_fails = "boom"
        with pytest.raises(StartFailedError, match="boom") as caught:
            await far.start(_order("app-1"))
        assert caught.value.where == "app-1"
        bare.server.close()
        with pytest.raises(ConnectionError):
            await far.dial("bare")

    async def test_a_cancelled_call_is_cancelled_at_the_far_end(
        self, bare: BareNode, reach: Reach
    ) -> None:
        far = await reach(bare)
        bare.scripts["app"].plain_s = 600.0
        starting = asyncio.create_task(far.start(_order("app-1")))
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        async with asyncio.timeout(_LIMIT_S):
            while bare.cancelled != ["app-1"]:  # noqa: ASYNC110 - the node tells nobody
                await asyncio.sleep(0.01)
        assert await far.replicas() == ()

    async def test_ends_are_told_as_they_happen(self, bare: BareNode, reach: Reach) -> None:
        far = await reach(bare)
        await far.start(_order("app-1"))
        await far.start(_order("app-2"))
        told: asyncio.Queue[ReplicaStatus] = asyncio.Queue()

        async def listen() -> None:
            async for status in far.exits():
                told.put_nowait(status)

        listening = asyncio.create_task(listen())
        try:
            async with asyncio.timeout(_LIMIT_S):
                while not bare._listeners:  # noqa: ASYNC110 - the node tells nobody
                    await asyncio.sleep(0.01)
                for number in (1, 2):
                    await bare.exit_replica(f"app-{number}", number)
                    status = await told.get()
                    assert (status.replica, status.exit_code) == (f"app-{number}", number)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def test_what_is_long_arrives_whole(self, bare: BareNode, reach: Reach) -> None:
        far = await reach(bare)
        bare._logs["old"] = bytes(range(256)) * 4096
        assert await far.logs("old", tail_bytes=_MIB) == bare._logs["old"]


def _order(replica: str) -> StartOrder:
    spec = ReplicaSpec(
        tenant="default", app="app", definition="d", image="host", command=("serve",), port=8000,
        ready_path="/", canary=Canary("/"),
    )  # fmt: skip
    return StartOrder(replica, Lease("m/0", 1), spec)


async def _echo(opened: socket.socket) -> None:
    with opened:
        await send_all(opened, await read_all(opened))


async def send_all(end: socket.socket, data: bytes) -> None:
    """Sends it and ends the direction."""
    await asyncio.get_running_loop().sock_sendall(end, data)
    end.shutdown(socket.SHUT_WR)


async def read_some(end: socket.socket) -> bytes:
    """What comes next; empty at the end."""
    async with asyncio.timeout(_LIMIT_S):
        return await asyncio.get_running_loop().sock_recv(end, _MIB)


async def read_all(end: socket.socket) -> bytes:
    """Everything up to the end of the direction."""
    received = bytearray()
    while data := await read_some(end):
        received += data
    return bytes(received)


async def fill(end: socket.socket) -> int:
    """Writes until nothing more is taken for a second; how much was."""
    sent, chunk = 0, bytes(65536)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        while sent < 64 * _MIB:
            try:
                sent += end.send(chunk)
            except BlockingIOError:
                async with asyncio.timeout(1.0):
                    await _writable(loop, end)
    return sent


async def _writable(loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_writer(end, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(end)
