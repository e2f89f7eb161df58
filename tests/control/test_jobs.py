"""Queued requests: answered later, once, and also across a restart."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

ASYNC = {"Prefer": "respond-async"}


async def queue(stand: Any, method: str, path: str, **more: Any) -> str:
    async with stand.client.request(method, path, headers=ASYNC, **more) as answer:
        document = await answer.json()
        assert answer.status == 202, document
        assert answer.headers["Location"] == document["place"]
        return str(document["place"])


async def fetch(stand: Any, place: str) -> tuple[int, bytes]:
    return await stand.get(place)


async def answer(stand: Any, until: Any, place: str) -> tuple[int, bytes]:
    async def is_there() -> bool:
        return bool((await fetch(stand, place))[0] != 202)

    await until(is_there)
    return await fetch(stand, place)


async def test_an_answer_is_fetched_later(stand: Any, text: Any, until: Any) -> None:
    stand.node.scripts["smol"].plain_s = 0.3
    await stand.up(text())
    place = await queue(stand, "POST", "/smol/upload?x=1", data=b"a" * 300_000)
    assert (await fetch(stand, place))[0] == 202
    status, body = await answer(stand, until, place)
    assert status == 200
    assert json.loads(body)["bytes"] == 300_000
    assert await fetch(stand, place) == (status, body)  # also again


async def test_what_the_replica_gets_is_the_request_without_the_key(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    place = await queue(stand, "POST", "/smol/echo/a%20b?c", data=b"hello")
    document = json.loads((await answer(stand, until, place))[1])
    seen = {name.lower() for name, _ in document["headers"]}
    assert (document["path"], document["bytes"]) == ("/echo/a%20b?c", 5)
    assert not seen & {"authorization", "prefer"}


async def test_openai_requests_can_be_queued_by_their_model(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    body = {"model": "smol", "prompt": "x", "max_tokens": 2}
    place = await queue(stand, "POST", "/v1/completions", json=body)
    assert (await answer(stand, until, place))[0] == 200


async def test_only_the_key_that_queued_it_fetches_it(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text())
    place = await queue(stand, "GET", "/smol/health")
    other = (await stand.admin("POST", "/api/keys?name=other"))["key"]
    for headers, status in (({"Authorization": f"Bearer {other}"}, 404), ({}, 401)):
        async with aiohttp.ClientSession(stand.url, headers=headers) as client:
            for method in ("GET", "DELETE"):
                async with client.request(method, place) as refused:
                    assert refused.status == status
    assert (await answer(stand, until, place))[0] == 200
    for path in ("/nagara/jobs/" + "0" * 32, "/nagara/jobs/x", "/nagara/x"):
        assert (await stand.get(path))[0] in (403, 404)


async def test_a_job_waits_through_failing_starts_and_full_queues(
    stand: Any, text: Any, until: Any
) -> None:
    stand.node.scripts["smol"].failures = ["bad luck", "bad luck"]
    await stand.up(text(timeouts='{queue = "1s"}'))
    place = await queue(stand, "POST", "/smol/upload", data=b"abc")
    assert (await answer(stand, until, place))[0] == 200


async def test_a_replica_that_breaks_off_is_asked_again_only_if_that_does_no_harm(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    for method, times in (("POST", 1), ("PUT", 3)):
        place = await queue(stand, method, "/smol/exit?code=3")
        status, body = await answer(stand, until, place)
        assert status in (502, 405), body
        assert times


async def test_a_job_survives_a_restart_and_what_may_have_been_done_is_not_repeated(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(scale="{max = 1, concurrency = 1}"), slots=1)
    running = await queue(stand, "POST", "/smol/wait")
    await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
    waiting = await queue(stand, "GET", "/smol/health")
    key = stand.key
    stand.control._drain_s = 0.0
    await stand.down()
    await stand.up()
    stand.client.headers["Authorization"] = f"Bearer {key}"
    status, body = await answer(stand, until, running)
    assert (status, json.loads(body)["error"]["code"]) == (502, "job_failed")
    assert (await answer(stand, until, waiting))[0] == 200


async def test_a_job_can_be_forgotten(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text())
    place = await queue(stand, "POST", "/smol/wait")
    await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
    async with stand.client.delete(place) as gone:
        assert gone.status == 200
    assert (await fetch(stand, place))[0] == 404
    await until(lambda: stand.replica().running == 0)


async def test_the_number_of_jobs_and_their_size_are_bounded(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nagara.control.jobs.MAX_WAITING", 2)
    monkeypatch.setattr("nagara.control.job_requests.MAX_BODY_BYTES", 1000)
    await stand.up(text())
    places = [await queue(stand, "POST", "/smol/wait") for _ in range(2)]
    async with stand.client.post("/smol/wait", headers=ASYNC) as refused:
        assert refused.status == 429
    async with stand.client.post("/smol/upload", headers=ASYNC, data=b"a" * 2000) as refused:
        assert refused.status == 413
    for place in places:
        async with stand.client.delete(place) as gone:
            assert gone.status == 200


async def test_jobs_of_a_deleted_app_fail(stand: Any, text: Any, until: Any) -> None:
    stand.node.scripts["smol"].plain_s = 60.0
    await stand.up(text())
    place = await queue(stand, "POST", "/smol/x")
    await asyncio.sleep(0.1)
    await stand.admin("DELETE", "/api/apps/smol")
    status, body = await answer(stand, until, place)
    assert status == 502
    assert "deleted" in json.loads(body)["error"]["message"]
