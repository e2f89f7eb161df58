"""A whole control process in the test's loop, over a fake node, reached over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest
from page_stand import app_text
from postgres_server import PostgresServer, needs_postgres, postgres_server

from nagara.base.clock import Clock, SystemClock
from nagara.contract.replica import ModelMount
from nagara.control.control import Control, Ready
from nagara.testing.fake_node import FakeNode
from nagara.testing.fake_replica import FakeReplica
from nagara.testing.pools import a_machine


class Stand:
    """Control, its node and a client with the right key."""

    def __init__(self, folder: Path, node: FakeNode, clock: Clock) -> None:
        self.folder = folder
        self.node = node
        self.clock = clock
        self.url = ""
        self.key = ""
        self.control: Control | None = None
        self.client: aiohttp.ClientSession
        self._task: asyncio.Task[None] | None = None

    async def up(self, *texts: str, slots: int = 4, **settings: Any) -> "Stand":
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.control = Control(
            self.folder, self.node, a_machine(slots), clock=self.clock,
            models=lambda name: ModelMount(name, "digest"), **settings,
        )  # fmt: skip
        self._task = asyncio.create_task(self.control.run(ready.set_result))
        await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task
        self.url, self.key = ready.result().url, ready.result().api_key or ""
        self.client = aiohttp.ClientSession(
            self.url,
            headers={"Authorization": f"Bearer {self.key}"},
            connector=aiohttp.TCPConnector(limit=0),
        )
        for text in texts:
            await self.deploy(text)
        return self

    async def down(self, *, keep: bool = False) -> None:
        if self._task is None or self.control is None:
            return
        await self.client.close()
        self.control.stop(keep=keep)
        task, self._task = self._task, None
        await task

    async def deploy(self, text: str) -> list[dict[str, Any]]:
        return (await self.admin("PUT", "/api/apps", data=text))["apps"]

    async def admin(self, method: str, path: str, **arguments: Any) -> Any:
        token = (self.folder / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        async with self.client.request(method, path, headers=headers, **arguments) as answer:
            document = await answer.json()
            assert answer.status == 200, document
            return document

    async def app(self, name: str = "smol") -> dict[str, Any]:
        return await self.admin("GET", f"/api/apps/{name}")

    async def starts(self, name: str, count: int) -> list[dict[str, Any]]:
        """The trace of an app or a replica, when it has so many: written after the answers."""
        trace: dict[str, Any] = {}

        async def has_all() -> bool:
            nonlocal trace
            trace = await self.admin("GET", f"/api/trace/{name}")
            return len(trace["starts"]) >= count

        await eventually(has_all)
        return list(trace["starts"])

    async def get(self, path: str, **arguments: Any) -> tuple[int, bytes]:
        async with self.client.get(path, **arguments) as answer:
            return answer.status, await answer.read()

    def replica(self) -> FakeReplica:
        """The one replica there is."""
        (replica,) = self.node.live.values()
        return replica


async def eventually(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], limit_s: float = 30.0
) -> None:
    """Returns when the condition holds."""
    async with asyncio.timeout(limit_s):
        while True:
            holds = condition()
            if not isinstance(holds, bool):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(0.005)


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture
async def node(clock: Clock) -> AsyncIterator[FakeNode]:
    node = FakeNode(clock)
    yield node
    await node.close()
    for _ in range(10):  # what was accepted in the last moment finds its peer gone, and closes
        await asyncio.sleep(0)


@pytest.fixture
async def stand(tmp_path: Path, node: FakeNode, clock: Clock) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path / "state", node, clock)
    try:
        yield stand
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await stand.down()


@pytest.fixture
def text() -> Callable[..., str]:
    return app_text


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def url(server: PostgresServer) -> str:
    """An empty database."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS test WITH (FORCE)")
        connection.execute("CREATE DATABASE test")
    return server.url.replace("/postgres?", "/test?")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgres)])
def address(request: Any) -> str | None:
    return None if request.param == "sqlite" else request.getfixturevalue("url")
