"""Requests through the gateway to fake replicas."""

import asyncio
import gzip
import hashlib
import io
import json
from typing import Any

import aiohttp
import pytest

from nagara.control.gateway import MAX_ROUTED_BODY_BYTES


async def test_the_first_request_starts_a_replica_and_is_answered(stand: Any, text: Any) -> None:
    await stand.up(text())
    async with stand.client.get("/smol/echo/a?b=%20c") as answer:
        document = await answer.json()
        assert answer.status == 200
        assert document["path"] == "/echo/a?b=%20c"
        assert answer.headers["x-nagara-replica"] == document["replica"]
        assert float(answer.headers["x-nagara-queue-ms"]) >= 0
        assert int(answer.headers["x-nagara-cold-start-ms"]) >= 0
        assert answer.headers["X-Echo"] == "yes"
    assert len(stand.node.started) == 1


async def test_cold_start_header_is_zero_when_the_replica_was_there(stand: Any, text: Any) -> None:
    stand.node.scripts["smol"].plain_s = 0.05
    await stand.up(text())
    async with stand.client.get("/smol/health") as answer:
        assert int(answer.headers["x-nagara-cold-start-ms"]) >= 50
        assert float(answer.headers["x-nagara-queue-ms"]) >= 50
    async with stand.client.get("/smol/health") as answer:
        assert answer.headers["x-nagara-cold-start-ms"] == "0"


async def test_many_held_requests_start_one_replica(stand: Any, text: Any) -> None:
    stand.node.scripts["smol"].plain_s = 0.1
    await stand.up(text(scale="{concurrency = 32}"))
    statuses = await asyncio.gather(*(stand.get("/smol/health") for _ in range(20)))
    assert {status for status, _ in statuses} == {200}
    assert len(stand.node.started) == 1


async def test_hop_by_hop_headers_and_the_key_stay_at_the_gateway(stand: Any, text: Any) -> None:
    await stand.up(text())
    headers = {"Connection": "X-Mine", "X-Mine": "1", "TE": "trailers", "X-Kept": "2"}
    async with stand.client.get("/smol/echo", headers=headers) as answer:
        seen = {name.lower(): value for name, value in (await answer.json())["headers"]}
        assert "x-secret" not in answer.headers
    assert "x-mine" not in seen
    assert "te" not in seen
    assert "authorization" not in seen
    assert seen["x-kept"] == "2"
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert seen["x-forwarded-prefix"] == "/smol"


async def test_an_app_is_reached_by_host_name(stand: Any, text: Any) -> None:
    await stand.up(text())
    async with stand.client.get("/echo/x", headers={"Host": "smol.localhost"}) as answer:
        assert (await answer.json())["path"] == "/echo/x"
    # Its own /api is the app's, not the administrator's.
    async with stand.client.get("/api/apps", headers={"Host": "smol.localhost"}) as answer:
        assert answer.status == 404
        assert "x-nagara-replica" in answer.headers


async def test_openai_clients_choose_by_model(stand: Any, text: Any) -> None:
    command = '["nagara", "engine", "serve", "/models/smollm2", "--port", "${PORT}"]'
    await stand.up(text(command=command, models='["smollm2"]'))
    for model in ("smol", "smollm2"):
        body = {"model": model, "prompt": "x"}
        async with stand.client.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
            assert (await answer.json())["model"] == "smollm2"
    async with stand.client.get("/v1/models") as answer:
        assert [entry["id"] for entry in (await answer.json())["data"]] == ["smol"]
    async with stand.client.post("/v1/completions", json={"model": "gpt"}) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "model_not_found"
    async with stand.client.post("/v1/completions", data=b"{") as answer:
        assert answer.status == 400


async def test_the_official_client_streams(stand: Any, text: Any) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    await stand.up(text())
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key=stand.key) as client:
        stream = await client.chat.completions.create(
            model="smol", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError, match="no app serves"):
            await client.completions.create(model="other", prompt="x")
    assert pieces == ["six", " seven"]


@pytest.mark.parametrize("path", ["/smol/health", "/v1/models", "/nothing", "/api/apps"])
async def test_no_route_answers_without_a_key(stand: Any, text: Any, path: str) -> None:
    await stand.up(text())
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
        async with (
            aiohttp.ClientSession(stand.url) as client,
            client.get(path, headers=headers) as answer,
        ):
            assert answer.status == 401
            assert (await answer.json())["error"]["code"] == "invalid_api_key"
    assert stand.node.started == []


async def test_the_api_key_is_not_the_admin_token(stand: Any, text: Any) -> None:
    await stand.up(text())
    status, _ = await stand.get("/api/apps")
    assert status == 401


async def test_auth_off_lets_anybody_call_apps_but_not_the_api(stand: Any, text: Any) -> None:
    await stand.up(text(), auth="off")
    async with aiohttp.ClientSession(stand.url) as client:
        async with client.get("/smol/echo", headers={"Authorization": "Bearer own"}) as answer:
            assert ["Authorization", "Bearer own"] in (await answer.json())["headers"]
        async with client.get("/api/apps") as answer:
            assert answer.status == 401


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/smol/sleep", 403),
        ("/smol/%73leep", 403),
        ("/smol//wake/", 403),
        ("/smol/nagara/hooks", 403),
        ("/smol/NAGARA", 403),
        ("/smol/wake_up?x=1", 403),
        ("/v1/../smol/sleep", 400),
        ("/smol/%2e%2e/other", 400),
        ("/smol/sleepy", 404),
        ("/other/health", 404),
        ("/-/nothing", 404),
    ],
)
async def test_control_paths_and_path_tricks_are_refused(
    stand: Any, text: Any, path: str, status: int
) -> None:
    await stand.up(text())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rpartition(":")[2]))
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stand.key}\r\n"
        "Connection: close\r\n\r\n".encode()
    )
    line = (await reader.read()).partition(b"\r\n")[0]
    writer.close()
    assert line.split()[1] == str(status).encode()


async def test_large_bodies_go_both_ways_without_being_kept(stand: Any, text: Any) -> None:
    await stand.up(text())
    block = bytes(range(256)) * 4096
    digest = hashlib.sha256()

    async def upload() -> Any:
        for _ in range(40):
            digest.update(block)
            yield block

    async with stand.client.post("/smol/upload", data=upload()) as answer:
        assert await answer.json() == {"bytes": 40 * len(block), "sha256": digest.hexdigest()}
    async with stand.client.post("/smol/upload", data=io.BytesIO(block * 8)) as answer:
        assert (await answer.json())["bytes"] == 8 * len(block)
    for query in ("bytes=40000000", "bytes=40000000&length=1"):
        status, body = await stand.get(f"/smol/download?{query}")
        assert (status, len(body)) == (200, 40000000)


async def test_too_large_a_body_to_look_for_its_model_is_refused(stand: Any, text: Any) -> None:
    await stand.up(text())
    body = b'{"model": "smol", "prompt": "' + b"x" * MAX_ROUTED_BODY_BYTES
    async with stand.client.post("/v1/completions", data=io.BytesIO(body)) as answer:
        assert answer.status == 413


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[]", b"[" * 100_000, b'{"n": ' + b"9" * 5000])
async def test_a_body_that_is_no_json_is_the_clients_mistake(
    stand: Any, text: Any, body: bytes
) -> None:
    await stand.up(text())
    async with stand.client.post("/v1/completions", data=io.BytesIO(body)) as answer:
        assert answer.status == 400


async def test_a_large_body_with_a_model_is_passed_on_whole(stand: Any, text: Any) -> None:
    await stand.up(text(command='["vllm", "serve", "big"]'))
    body = json.dumps({"model": "smol", "prompt": "x" * 3_000_000}).encode()
    async with stand.client.post("/v1/completions", data=io.BytesIO(body)) as answer:
        assert answer.status == 200
        assert (await answer.json())["model"] == "big"


async def test_server_sent_events_arrive_one_by_one(stand: Any, text: Any) -> None:
    await stand.up(text())
    async with stand.client.get("/smol/sse?events=3") as answer:
        for number in range(3):
            stand.replica().next_event()
            async with asyncio.timeout(5):
                assert await answer.content.readany() == f"data: {number}\n\n".encode()
        assert await answer.content.read() == b""


async def test_websockets_are_joined_and_close_codes_cross(stand: Any, text: Any) -> None:
    await stand.up(text())
    async with stand.client.ws_connect("/smol/ws", protocols=("other", "echo")) as socket:
        assert socket.protocol == "echo"
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
        await socket.send_bytes(b"x" * 3_000_000)
        assert len(await socket.receive_bytes()) == 3_000_000
        await socket.send_str("bye")
        message = await socket.receive()
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert (message.data, message.extra) == (4001, "as you wish")
    await asyncio.sleep(0)
    assert (await stand.app())["running"] == 0


async def test_a_refused_websocket_keeps_its_status(stand: Any, text: Any) -> None:
    await stand.up(text())
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await stand.client.ws_connect("/smol/no-such")
    assert caught.value.status == 404


async def test_a_client_that_leaves_cancels_its_request(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    request = asyncio.create_task(stand.get("/smol/wait"))
    await until(lambda: stand.replica().running == 1)
    request.cancel()
    await until(lambda: stand.replica().cancelled == ["/wait"])
    assert (await stand.app())["running"] == 0


async def test_a_client_that_leaves_while_held_leaves_the_queue(
    stand: Any, text: Any, until: Any
) -> None:
    stand.node.scripts["smol"].plain_s = 0.3
    await stand.up(text())
    request = asyncio.create_task(stand.get("/smol/wait"))

    async def is_held() -> bool:
        return bool((await stand.app())["held"] == 1)

    await until(is_held)
    request.cancel()

    async def is_gone() -> bool:
        app = await stand.app()
        return bool(app["held"] == 0 and app["running"] == 0)

    await until(is_gone)
    await until(lambda: len(stand.node.started) == 1)
    assert stand.replica().requests == []


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(
    stand: Any, text: Any
) -> None:
    await stand.up(text())
    with pytest.raises(aiohttp.ClientPayloadError):
        await stand.get("/smol/cut")


async def test_head_and_empty_answers_pass(stand: Any, text: Any) -> None:
    await stand.up(text())
    async with stand.client.head("/smol/health") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Length"] == "2"
    async with stand.client.post("/smol/echo") as answer:
        assert (await answer.json())["bytes"] == 0
    async with stand.client.delete("/smol/echo") as answer:
        assert (await answer.json())["method"] == "DELETE"


async def test_expect_100_continue_is_answered_when_a_replica_takes_the_request(
    stand: Any, text: Any
) -> None:
    await stand.up(text())
    async with stand.client.post("/smol/upload", data=b"abc", expect100=True) as answer:
        assert (await answer.json())["bytes"] == 3
    body = json.dumps({"model": "smol", "prompt": "x"}).encode()
    async with stand.client.post("/v1/completions", data=body, expect100=True) as answer:
        assert answer.status == 200


async def test_a_slow_answer_ends_with_504(stand: Any, text: Any) -> None:
    await stand.up(text(timeouts='{request = "100ms"}'))
    status, body = await stand.get("/smol/wait")
    assert status == 504
    assert json.loads(body)["error"]["code"] == "request_timeout"


async def test_a_control_path_is_not_reached_by_a_fragment(stand: Any, text: Any) -> None:
    await stand.up(text())
    head = f"Host: x\r\nAuthorization: Bearer {stand.key}\r\nConnection: close\r\n\r\n"
    answer = await _raw(stand, f"GET /smol/sleep#x HTTP/1.1\r\n{head}")
    assert answer.startswith(b"HTTP/1.1 400")
    assert stand.node.started == []


async def test_a_compressed_body_passes_as_it_is(stand: Any, text: Any) -> None:
    await stand.up(text())
    plain = b"".join(b"%d" % number for number in range(200_000))
    body = gzip.compress(plain)
    headers = {"Content-Encoding": "gzip"}
    for data in (body, io.BytesIO(body)):
        async with stand.client.post("/smol/upload", data=data, headers=headers) as answer:
            document = await answer.json()  # the replica's server has unpacked it
            assert document["sha256"] == hashlib.sha256(plain).hexdigest()


async def test_a_compressed_body_is_refused_where_its_model_decides(stand: Any, text: Any) -> None:
    await stand.up(text())
    body = gzip.compress(b'{"model": "smol"}')
    headers = {"Content-Encoding": "gzip"}
    async with stand.client.post("/v1/completions", data=body, headers=headers) as answer:
        assert answer.status == 415


async def test_half_an_answer_to_http_1_0_ends_with_a_reset(stand: Any, text: Any) -> None:
    """Its connection's end is the answer's end: an orderly one would make it whole."""
    await stand.up(text())
    head = f"Host: x\r\nAuthorization: Bearer {stand.key}\r\n\r\n"
    with pytest.raises(ConnectionResetError):
        await _raw(stand, f"GET /smol/cut HTTP/1.0\r\n{head}")


async def _raw(stand: Any, request: str) -> bytes:
    """What comes back for bytes sent as they are, until the connection ends."""
    host, _, port = stand.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request.encode())
        return await reader.read()
    finally:
        writer.close()
