"""What listeners are told, and how the routes of the history go on."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from nagara.base.clock import SystemClock
from nagara.control.live import Live
from nagara.control.telemetry import Telemetry


async def events(stand: Any) -> AsyncIterator[tuple[str, Any]]:
    token = (stand.folder / "admin.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with stand.client.get(
        "/api/events", headers=headers, timeout=aiohttp.ClientTimeout(None), read_bufsize=2**24
    ) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        while name := await answer.content.readline():
            data = await answer.content.readline()
            await answer.content.readline()
            yield name.decode()[7:-1], json.loads(data[6:])


async def test_a_listener_gets_all_at_first_and_then_what_changes(
    stand: Any, text: Callable[..., str]
) -> None:
    await stand.up(text())
    told = events(stand)
    name, hello = await anext(told)
    assert name == "hello"
    assert [app["name"] for app in hello["apps"]] == ["smol"]
    assert hello["pool"]["level"] == 4
    assert await stand.get("/smol/health") == (200, b"ok")
    seen: dict[str, Any] = {}
    async with asyncio.timeout(30):
        async for name, document in told:
            seen[name] = document
            if name == "starts":
                break
    assert [start["app"] for start in seen["starts"]] == ["smol"]
    assert seen["apps"]["changed"][0]["ready"] == 1
    await stand.admin("DELETE", "/api/apps/smol")
    async with asyncio.timeout(30):
        async for name, document in told:
            if name == "apps" and document["gone"]:
                assert document["gone"] == ["smol"]
                break


async def test_without_a_token_nothing_is_told(stand: Any, text: Callable[..., str]) -> None:
    await stand.up(text())
    for path in ("/api/events", "/api/starts", "/api/captures", "/api/snapshots"):
        assert (await stand.get(path))[0] == 401


async def test_a_snapshot_is_told_with_its_needs_and_its_uses(
    stand: Any, text: Callable[..., str], until: Callable[..., Any]
) -> None:
    await stand.up(text())
    stand.node.scripts["smol"].can_snapshot = True
    assert (await stand.get("/smol/health"))[0] == 200
    await until(lambda: bool(stand.node.captured))
    for _ in range(2):
        await stand.admin("POST", "/api/apps/smol/fold")
        assert (await stand.get("/smol/health"))[0] == 200
    stand.node.scripts["smol"].failed_restores.append("the canary failed")
    await stand.admin("POST", "/api/apps/smol/fold")
    assert (await stand.get("/smol/health"))[0] == 200
    starts = await stand.starts("smol", 4)
    assert starts[0]["fallback"] == "the canary failed"
    (told,) = (await stand.admin("GET", "/api/snapshots"))["snapshots"]
    assert (told["app"], told["snapshot"], told["state"]) == ("smol", "fake-snapshot", "good")
    assert told["cpu_flags"] == ["avx2", "fma", "sse4_2"]
    assert (told["stored_bytes"], told["shared_bytes"]) == (900, 100)
    assert (told["restores"], told["failed_restores"]) == (2, 1)
    assert told["restored_s"] > 0
    assert told["is_present"]
    assert (await stand.admin("GET", "/api/snapshots?app=other"))["snapshots"] == []
    await stand.deploy(text(env='{A = "2"}'))
    (told,) = (await stand.admin("GET", "/api/snapshots?app=smol"))["snapshots"]
    assert not told["is_present"]


async def test_listeners_end_with_nagara(stand: Any, text: Callable[..., str]) -> None:
    await stand.up(text())
    token = (stand.folder / "admin.token").read_text().strip()
    async with aiohttp.ClientSession(stand.url) as session:
        answer = await session.get("/api/events", headers={"Authorization": f"Bearer {token}"})
        await answer.content.readline()
        async with asyncio.timeout(30):
            await stand.down()
            async for _ in answer.content:
                pass


async def test_older_starts_are_told_a_page_at_a_time(stand: Any, text: Callable[..., str]) -> None:
    await stand.up(text())
    for _ in range(5):
        assert (await stand.get("/smol/health"))[0] == 200
        await stand.admin("POST", "/api/apps/smol/fold")
    await stand.starts("smol", 5)
    whole = (await stand.admin("GET", "/api/starts"))["starts"]
    assert len(whole) == 5
    first = (await stand.admin("GET", "/api/starts?limit=2"))["starts"]
    rest = (await stand.admin("GET", f"/api/starts?app=smol&before={first[-1]['id']}"))["starts"]
    assert first + rest == whole
    assert (await stand.admin("GET", "/api/starts?app=other"))["starts"] == []
    replicas = (await stand.admin("GET", "/api/apps/smol/replicas"))["replicas"]
    assert {each["state"] for each in replicas} == {"stopped"}
    for wrong in ("limit=0", "limit=x", "limit=1001", "before=-1"):
        token = (stand.folder / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        assert (await stand.get(f"/api/starts?{wrong}", headers=headers))[0] == 400


class StillPool:
    """A pool in which nothing happens."""

    def figures(self) -> SimpleNamespace:
        return SimpleNamespace(level=1, target=0.0, leased=0)

    def document(self) -> dict[str, Any]:
        return {"machines": []}

    def plan_document(self) -> dict[str, Any]:
        return {}


class NoHistory:
    async def starts(self) -> list[dict[str, Any]]:
        return []

    async def starts_after(self, id_: int) -> list[dict[str, Any]]:
        return []


async def test_a_listener_that_does_not_read_is_let_go_and_others_go_on() -> None:
    live = Live({}, Telemetry(SystemClock()), StillPool(), NoHistory(), SystemClock())  # type: ignore[arg-type]
    slow, quick = live.listen(), live.listen()
    assert (await anext(slow)).startswith(b"event: hello")
    assert (await anext(quick)).startswith(b"event: hello")
    for _ in range(100):
        await live.look()
        assert (await anext(quick)).startswith(b"event: sample")
    assert [event async for event in slow] == []
    live.close()
    assert [event async for event in quick] == []
    assert [event async for event in live.listen()] == []


@pytest.mark.parametrize("way", ["path", "host"])
async def test_html_of_an_app_is_kept_apart_where_it_shares_the_address(
    stand: Any, text: Callable[..., str], way: str
) -> None:
    await stand.up(text())
    path, headers = ("/smol/page", {}) if way == "path" else ("/page", {"Host": "smol.example"})
    async with stand.client.get(path, headers=headers) as answer:
        policies = answer.headers.getall("Content-Security-Policy", [])
    assert answer.content_type == "text/html"
    assert bool(policies) == (way == "path")
    assert all(policy.startswith("sandbox allow-scripts") for policy in policies)
