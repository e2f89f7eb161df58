"""What a hostile client may send: requests that mean two things, heads without end, slow ones.

The replica behind the gateway is a raw socket that keeps every byte: whatever the gateway makes of
a request, the replica must see no request that the gateway did not mean to send.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nagara.control.api import Api
from nagara.control.watch_api import WatchApi
from nagara.control.web_server import MAX_HEAD_BYTES

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class RawReplica:
    """Answers everything that looks like a request with "ok", and remembers all bytes."""

    def __init__(self) -> None:
        self.received = b""
        self._server: asyncio.Server

    async def begin(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def dial(self, _: str) -> socket.socket:
        connected = socket.socket()
        connected.setblocking(False)
        address = self._server.sockets[0].getsockname()
        await asyncio.get_running_loop().sock_connect(connected, address)
        return connected

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                self.received += piece
                if b"\r\n\r\n" in piece or piece.endswith((b"0\r\n\r\n", b"\r\n")):
                    writer.write(_ANSWER)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def end(self) -> None:
        self._server.close()

    @property
    def requests(self) -> list[bytes]:
        """Request lines, wherever they stand."""
        return re.findall(rb"(?:GET|POST|PUT|DELETE|SMUGGLED) [^\r\n]* HTTP/1\.\d", self.received)


@pytest.fixture
async def raw(stand: Any, text: Any) -> AsyncIterator[RawReplica]:
    replica = RawReplica()
    await replica.begin()
    stand.node.dial = replica.dial
    await stand.up(text(), auth="off")
    await stand.get("/smol/health")
    replica.received = b""
    yield replica
    replica.end()


async def send(stand: Any, data: bytes, *, limit_s: float = 10.0) -> bytes:
    """Everything the gateway says to these bytes until it closes, or stays silent for a moment."""
    host, port = stand.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = b""
    try:
        writer.write(data)
        async with asyncio.timeout(limit_s):
            while piece := await asyncio.wait_for(reader.read(65536), 1.0 if said else limit_s):
                said += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return said


HEAD = b"POST /smol/x HTTP/1.1\r\nHost: a\r\n"
INNER = b"SMUGGLED /smol/inner HTTP/1.1\r\nHost: a\r\n\r\n"
AMBIGUOUS = {
    "two lengths": HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(INNER) + INNER,
    "a list of lengths": HEAD + b"Content-Length: 0, %d\r\n\r\n" % len(INNER) + INNER,
    "length and chunks": HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n"
    % len(b"0\r\n\r\n" + INNER) + b"0\r\n\r\n" + INNER,
    "a signed length": HEAD + b"Content-Length: +%d\r\n\r\n" % len(INNER) + INNER,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + INNER,
    "a hexadecimal length": HEAD + b"Content-Length: 0x10\r\n\r\n" + INNER,
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + INNER,
    "chunked not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + INNER,
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\n" + INNER,
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + INNER,
    "a tab in the coding": HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + INNER,
    "a folded header": HEAD + b"X: a\r\n Content-Length: 5\r\n\r\n" + INNER,
    "a chunk of hexadecimal words": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n"
    b"0\r\n\r\n" + INNER,
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n"
    + INNER,
    "an endless chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n"
    + INNER,
    "a chunk without its end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdeXX0\r\n\r\n"
    + INNER,
    "a bare line feed": b"POST /smol/x HTTP/1.1\nHost: a\nContent-Length: 5\n\n" + INNER,
    "a bare return": HEAD + b"X: a\rContent-Length: 5\r\n\r\n" + INNER,
    "a zero byte": HEAD + b"X: a\0b\r\n\r\n" + INNER,
    "a name with a space": HEAD + b"X Y: a\r\n\r\n" + INNER,
    "no name": HEAD + b": a\r\n\r\n" + INNER,
    "an unknown version": b"GET /smol/x HTTP/9.9\r\nHost: a\r\n\r\n" + INNER,
    "a version without digits": b"GET /smol/x HTTP/x\r\nHost: a\r\n\r\n" + INNER,
    "two spaces": b"GET  /smol/x  HTTP/1.1\r\nHost: a\r\n\r\n" + INNER,
    "no version": b"GET /smol/x\r\n\r\n" + INNER,
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_a_request_that_means_two_things_reaches_no_replica_twice(
    stand: Any, raw: RawReplica, name: str
) -> None:
    said = await send(stand, AMBIGUOUS[name])
    statuses = re.findall(rb"HTTP/1\.[01] (\d{3})", said)
    # Refused; or taken for exactly what the gateway read. Then each further request is one that
    # the gateway itself has read, routed and answered, never one that only the replica saw.
    assert len(raw.requests) <= statuses.count(b"200"), (said, raw.received)
    if b"200" not in statuses:
        assert raw.received == b""
        assert not statuses or statuses[0] in (b"400", b"501", b"505"), said


async def test_pipelined_requests_are_answered_in_order(stand: Any, raw: RawReplica) -> None:
    one = b"GET /smol/%d HTTP/1.1\r\nHost: a\r\n\r\n"
    said = await send(stand, one % 1 + one % 2 + b"GET /api/apps HTTP/1.1\r\nHost: a\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d{3})", said) == [b"200", b"200", b"401"]
    assert raw.requests == [b"GET /1 HTTP/1.1", b"GET /2 HTTP/1.1"]


async def test_chunked_bodies_are_made_anew(stand: Any, raw: RawReplica) -> None:
    body = b"5;ext=1\r\nabcde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    said = await send(stand, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert said.startswith(b"HTTP/1.1 200")
    assert b"ext=1" not in raw.received
    assert b"abcde" in raw.received


@pytest.mark.parametrize(
    "head",
    [
        b"GET /smol/" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /smol/x HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /smol/x HTTP/1.1\r\nHost: a\r\n" + b"a" * 70_000 + b": x\r\n\r\n",
    ],
    ids=["line", "value", "name"],
)
async def test_an_oversized_part_of_a_head_is_refused(
    stand: Any, raw: RawReplica, head: bytes
) -> None:
    said = await send(stand, head)
    assert not said or said.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 431")), said
    assert raw.received == b""


async def test_a_head_without_end_is_cut_off(stand: Any, raw: RawReplica) -> None:
    host, port = stand.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /smol/x HTTP/1.1\r\nHost: a\r\n")
    sent = 0
    is_cut = False
    while not is_cut and sent < 20 * MAX_HEAD_BYTES:
        writer.write(b"X-1: a\r\n" * 500)
        sent += 500 * 8
        try:
            await asyncio.wait_for(writer.drain(), 30)
        except ConnectionError:
            is_cut = True
        await asyncio.sleep(0)
        is_cut = is_cut or reader.at_eof() or reader.exception() is not None
    assert is_cut
    writer.close()
    assert raw.received == b""


async def test_a_client_that_sends_its_head_slowly_is_cut_off(
    stand: Any, raw: RawReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nagara.control.web_server.LimitedServer.head_s", 0.5)
    for begin in (b"", b"GET /smol/x HT", b"GET /smol/x HTTP/1.1\r\nHost: a\r\n"):
        assert await send(stand, begin, limit_s=30) == b""
    # After a whole request as well.
    whole = b"GET /smol/1 HTTP/1.1\r\nHost: a\r\n\r\n"
    assert (await send(stand, whole + b"GET /smol/2 HT", limit_s=30)).count(b"HTTP/1.1 200") == 1
    assert raw.requests == [b"GET /1 HTTP/1.1"]


async def test_a_slow_body_ends_with_the_requests_time(stand: Any, text: Any) -> None:
    await stand.up(text(timeouts='{request = "1s"}'), auth="off")
    await stand.get("/smol/health")
    said = await send(
        stand, b"POST /smol/upload HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nab", limit_s=30
    )
    assert said.startswith(b"HTTP/1.1 504")


async def test_a_slow_body_that_says_its_model_is_given_up(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nagara.control.gateway.ROUTED_BODY_S", 0.3)
    await stand.up(text(), auth="off")
    said = await send(
        stand, b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{", limit_s=30
    )
    assert said.startswith(b"HTTP/1.1 408")


async def test_an_app_file_that_does_not_come_is_given_up(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nagara.control.api.BODY_S", 0.3)
    await stand.up(text(), auth="off")
    token = (stand.folder / "admin.token").read_bytes().strip()
    head = b"PUT /api/apps HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n"
    said = await send(stand, head + b"Authorization: Bearer " + token + b"\r\n\r\n[app", limit_s=30)
    assert said.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "target",
    [
        b"/smol/a%0d%0aX-Injected:%201", b"/smol/a%00b", b"/smol/%252e%252e/x",
        b"/smol/a%2fb", b"/smol/;x=1/y", b"/smol//x",
    ],
)  # fmt: skip
async def test_coded_characters_reach_the_replica_as_they_are(
    stand: Any, raw: RawReplica, target: bytes
) -> None:
    await send(stand, b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
    assert b"\r\nX-Injected" not in raw.received
    if raw.received:
        assert raw.requests == [b"GET %b HTTP/1.1" % target.removeprefix(b"/smol")]


@pytest.mark.parametrize(
    "target",
    [
        b"/smol/../api/apps", b"/smol/%2e%2e/api/apps", b"/smol/..%2fapi", b"/smol/x/..",
        b"/smol/.%2e/x", b"/smol/a\\..\\b", b"/smol/sle%65p", b"/smol//sleep/", b"/smol/x#/../y",
        b"http://evil/smol/x", b"*", b"evil:443", b"//smol/x", b"/smol\t/x",
    ],
)  # fmt: skip
async def test_path_tricks_reach_nothing(stand: Any, raw: RawReplica, target: bytes) -> None:
    said = await send(stand, b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
    assert not said or int(said.split(b" ")[1]) in (400, 401, 403, 404), said
    assert raw.received == b""


# -- who may call --------------------------------------------------------------------------


async def test_every_route_of_the_api_is_closed_without_the_admin_token(
    stand: Any, text: Any
) -> None:
    await stand.up(text(), auth="off")  # apps are open; the API never is
    await stand.get("/smol/health")
    examples = {
        "app": "smol",
        "name": "smol",
        "tenant": "default",
        "id": "0a",
        "secret": "TOKEN",
        "job": "0a",
    }
    count = 0
    none: object = None
    watch = WatchApi(none, none)  # type: ignore[arg-type]
    api = Api(*[none] * 7, watch)  # type: ignore[arg-type]
    for method, pattern, _ in api.routes:
        path = re.sub(r"\(\?P<(\w+)>[^)]*\)", lambda match: examples[match[1]], pattern.pattern)
        assert pattern.fullmatch(path), path
        for headers in ({}, {"Authorization": "Bearer nga-wrong"}, {"Authorization": "Basic x"}):
            async with stand.client.request(
                method, path, headers={"Authorization": "", **headers}
            ) as answer:
                assert answer.status == 401, (method, path)
        count += 1
    assert count >= 18
    assert (await stand.app())["name"] == "smol"  # nothing of it was carried out


_settings = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


async def test_the_api_answers_nonsense_without_breaking(stand: Any, text: Any) -> None:
    """Methods, paths, queries and bodies at random around the real routes."""
    await stand.up(text())
    token = (stand.folder / "admin.token").read_text().strip()
    words = st.sampled_from(
        ["apps", "smol", "keys", "trace", "pool", "plan", "usage", "versions", "rollback", "logs",
         "machines", "status", "fold", "x", "..", "%00", "%2f", "é", "", "0a", "-1"]
    )  # fmt: skip
    paths = st.lists(words, max_size=4).map(lambda parts: "/api/" + "/".join(parts))
    queries = st.sampled_from(
        ["", "?to=1", "?to=x", "?tail_bytes=-1", "?tail_bytes=99999999999999999999", "?kind=é",
         "?file=%00", "?name=" + "a" * 2000, "?replica=../x", "?%ff=%ff"]
    )  # fmt: skip
    bodies = st.sampled_from([b"", b"\xff", b"[app.x]", b"{", b"[app]\n" * 1000, b"a = 1"])
    methods = st.sampled_from(["GET", "PUT", "POST", "PATCH", "HEAD", "OPTIONS", "NONSENSE"])
    cases: list[tuple[str, str, bytes]] = []

    @_settings
    @given(methods, paths, queries, bodies)
    def collect(method: str, path: str, query: str, body: bytes) -> None:
        cases.append((method, path + query, body))

    collect()
    for method, path, body in cases:
        said = await send(
            stand,
            b"%b %b HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b"
            % (method.encode(), path.encode(), token.encode(), len(body), body),
        )
        if said:
            status = int(said.split(b" ")[1])
            assert status < 500, (method, path, body, said)
            assert token.encode() not in said
    assert (await stand.app())["name"] == "smol"
