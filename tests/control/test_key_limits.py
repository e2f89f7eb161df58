"""What a key may do: which apps, how often, how many at once."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.control.key_limits import KeyLimits, KeyUse
from nagara.control.refusal import Refusal


def test_a_bucket_is_full_at_first_and_fills_again() -> None:
    use = KeyUse(KeyLimits(per_minute=3))
    for _ in range(3):
        use.begin("a", 100.0)
    with pytest.raises(Refusal) as caught:
        use.begin("a", 110.0)
    assert (caught.value.status, caught.value.code) == (429, "key_rate")
    assert caught.value.retry_after_s == pytest.approx(10.0)
    use.begin("a", 120.0)
    with pytest.raises(Refusal):
        use.begin("a", 120.0)


@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=200))
def test_never_more_than_a_full_bucket_and_what_has_run_in(
    per_minute: int, pauses_s: list[float]
) -> None:
    use, now_s, done = KeyUse(KeyLimits(per_minute=per_minute)), 0.0, 0
    for pause_s in pauses_s:
        now_s += pause_s
        try:
            use.begin("a", now_s)
        except Refusal:
            continue
        done += 1
    assert done <= per_minute * (1 + now_s / 60) + 1e-6


async def new_key(stand: Any, query: str) -> aiohttp.ClientSession:
    key = (await stand.admin("POST", f"/api/keys?name=n&{query}"))["key"]
    return aiohttp.ClientSession(stand.url, headers={"Authorization": f"Bearer {key}"})


async def test_a_key_is_for_its_apps_only(stand: Any, text: Any) -> None:
    await stand.up(text("one"), text("two"))
    async with await new_key(stand, "apps=one,three") as client:
        async with client.get("/one/health") as answer:
            assert answer.status == 200
        for refused in (
            client.get("/two/health"),
            client.get("/x", headers={"Host": "two.example"}),
            client.post("/v1/completions", json={"model": "two", "prompt": "x"}),
            client.post("/two/upload", headers={"Prefer": "respond-async"}),
        ):
            async with refused as answer:
                assert answer.status == 403
                assert json.loads(await answer.read())["error"]["code"] == "not_this_key"
    assert {name.rpartition("-")[0] for name in stand.node.live} == {"one"}


async def test_requests_at_once_are_bounded_and_given_back(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    async with await new_key(stand, "concurrency=1") as client:
        running = asyncio.create_task(client.get("/smol/wait"))
        await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
        async with client.get("/smol/health") as answer:
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
        assert (await stand.get("/smol/health"))[0] == 200  # another key
        stand.replica().let_go()
        (await running).close()
        for _ in range(3):
            async with client.get("/smol/health") as answer:
                assert answer.status == 200


async def test_limits_outlive_a_restart_and_are_listed(stand: Any, text: Any) -> None:
    await stand.up(text())
    client = await new_key(stand, "per_minute=2&apps=smol")
    authorization = client.headers["Authorization"]
    await client.close()
    await stand.down()
    await stand.up()
    keys = (await stand.admin("GET", "/api/keys"))["keys"]
    assert keys[1]["limits"] == {"apps": ["smol"], "per_minute": 2, "concurrency": None}
    headers = {"Authorization": authorization}
    statuses = []
    for _ in range(3):
        async with stand.client.get("/smol/health", headers=headers) as answer:
            statuses.append(answer.status)
    assert statuses == [200, 200, 429]


@pytest.mark.parametrize("query", ["per_minute=0", "concurrency=-1", "per_minute=x",
                                   "concurrency=99999999999"])  # fmt: skip
async def test_a_limit_that_is_none_is_refused(stand: Any, text: Any, query: str) -> None:
    await stand.up(text())
    token = (stand.folder / "admin.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with stand.client.post(f"/api/keys?{query}", headers=headers) as answer:
        assert answer.status == 400


async def test_all_keys_of_a_tenant_are_bounded_together_beside_their_own_bounds(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    bounds = await stand.admin("PUT", "/api/tenants/default?concurrency=1")
    assert bounds == {"default": {"per_minute": None, "concurrency": 1}}
    async with await new_key(stand, "apps=other") as foreign, await new_key(stand, "") as client:
        async with foreign.get("/smol/health") as answer:  # no use of the tenant's
            assert answer.status == 403
        running = asyncio.create_task(client.get("/smol/wait"))
        await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
        status, body = await stand.get("/smol/health")
        assert (status, json.loads(body)["error"]["code"]) == (429, "tenant_concurrency")
        await stand.admin("PUT", "/api/tenants/default?concurrency=2")
        assert (await stand.get("/smol/health"))[0] == 200
        stand.replica().let_go()
        (await running).close()
    await stand.admin("PUT", "/api/tenants/default?per_minute=2")
    await stand.down()
    await stand.up()
    tenants = (await stand.admin("GET", "/api/tenants"))["tenants"]
    assert tenants == {"default": {"per_minute": 2, "concurrency": None}}
    assert [(await stand.get("/smol/health"))[0] for _ in range(3)] == [200, 200, 429]
    await stand.admin("PUT", "/api/tenants/default")  # none any more
    assert (await stand.get("/smol/health"))[0] == 200
