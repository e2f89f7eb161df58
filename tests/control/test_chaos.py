"""Everything at once, at random but repeatable: no request is lost, nothing leaks."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest

HONEST = {
    502: {"replica_failed"},
    503: {"start_failed", "no_supply", "unreachable", "queue_timeout"},
}


async def _call(stand: Any, app: str, chance: random.Random, seen: Counter[str]) -> None:
    paths = ["echo", "health", "download?bytes=300000", "upload"]
    path = chance.choice(paths)
    method = "POST" if path == "upload" else "GET"
    body = b"x" * 100_000 if path == "upload" else None
    try:
        async with stand.client.request(method, f"/{app}/{path}", data=body) as answer:
            content = await answer.read()
    except aiohttp.ClientPayloadError:
        seen["cut off"] += 1
        return
    if answer.status == 200:
        seen["ok"] += 1
        if path.startswith("download"):
            assert len(content) == 300_000
        if path == "upload":
            assert json.loads(content)["bytes"] == 100_000
        return
    code = json.loads(content)["error"]["code"]
    assert code in HONEST[answer.status], content
    seen[code] += 1


async def _client(stand: Any, seed: int, seen: Counter[str], is_over: asyncio.Event) -> None:
    chance = random.Random(seed)
    while not is_over.is_set():
        call = asyncio.create_task(_call(stand, chance.choice(["one", "two"]), chance, seen))
        if chance.random() < 0.1:
            await asyncio.sleep(chance.random() * 0.01)
            call.cancel()
            await asyncio.wait((call,))
            continue
        await call
        await asyncio.sleep(chance.random() * 0.01)


async def _disturb(stand: Any, seed: int, text: Any) -> None:
    chance = random.Random(seed)
    for number in range(60):
        await asyncio.sleep(0.03)
        match chance.randrange(5):
            case 0 if stand.node.live:
                name = chance.choice(list(stand.node.live))
                await stand.node.exit_replica(name, 9, is_seen=chance.random() < 0.8)
            case 1:
                await stand.admin("POST", f"/api/apps/{chance.choice(['one', 'two'])}/fold")
            case 2:
                stand.node.scripts["one"].failures = ["bad luck"]
            case 3:
                await stand.deploy(text("two", env=f'{{A = "{number}"}}', **SMALL))
            case _:
                stand.node.scripts["two"].plain_s = chance.random() * 0.05


SMALL = {"scale": "{max = 2, concurrency = 3}"}


@pytest.mark.parametrize("seed", range(3))
async def test_failures_are_honest_and_nothing_leaks(
    stand: Any, text: Any, until: Any, seed: int
) -> None:
    for script in (stand.node.scripts["one"], stand.node.scripts["two"]):
        script.plain_s, script.can_snapshot, script.capture_s = 0.02, True, 0.1
    await stand.up(text("one", **SMALL), text("two", **SMALL), slots=3)
    seen: Counter[str] = Counter()
    is_over = asyncio.Event()
    clients = [asyncio.create_task(_client(stand, seed * 100 + n, seen, is_over)) for n in range(6)]
    await _disturb(stand, seed, text)
    await until(lambda: seen["ok"] > 50)
    is_over.set()
    await asyncio.gather(*clients)

    async def is_quiet() -> bool:
        apps = (await stand.admin("GET", "/api/apps"))["apps"]
        return all(app["running"] == app["held"] == 0 for app in apps)

    await until(is_quiet)
    for name in ("one", "two"):
        await stand.admin("POST", f"/api/apps/{name}/fold")
    assert stand.node.live == {}

    async def is_all_free() -> bool:
        pool = await stand.admin("GET", "/api/pool")
        return pool["level"] == 3 and pool["leased"] == 0

    await until(is_all_free)
    for name in ("one", "two"):
        stand.node.scripts[name].failures = []
        await stand.deploy(text(name))  # forgets the failures, and the pause after them
        assert (await stand.get(f"/{name}/health"))[0] == 200
