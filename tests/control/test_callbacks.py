"""Queued requests whose answers are sent: to whom, signed how, and how often."""

import asyncio
import hashlib
import hmac
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nagara.control.callback_hosts import CallbackHosts, CallbackResolver, is_public
from nagara.control.refusal import Refusal
from nagara.testing.clock import JumpingClock


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


class Receiver:
    """Somebody who is called; answers with `statuses`, the last one for ever."""

    def __init__(self) -> None:
        self.statuses = [200]
        self.calls: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.calls.append((dict(request.headers), await request.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.Response(status=status, headers={"Location": "http://127.0.0.1:1/"})


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/done", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/done"
    yield receiver
    await runner.cleanup()


async def queued(stand: Any, path: str, callback: str, method: str = "POST") -> str:
    headers = {"Prefer": "respond-async", "x-nagara-callback": callback}
    data = b"hello" if method == "POST" else None
    async with stand.client.request(method, path, headers=headers, data=data) as answer:
        document = await answer.json()
        assert answer.status == 202, document
        return str(document["id"])


async def test_the_answer_is_sent_and_signed(
    stand: Any, text: Any, until: Any, receiver: Receiver
) -> None:
    await stand.up(text(), callback_hosts=["127.0.0.1"])
    id_ = await queued(stand, "/smol/echo", receiver.url)
    await until(lambda: bool(receiver.calls))
    headers, body = receiver.calls[0]
    echoed = json.loads(body)
    assert "x-nagara-callback" not in {name.lower() for name, _ in echoed["headers"]}
    assert (headers["x-nagara-job"], headers["x-nagara-status"]) == (id_, "200")
    time, _, signed = headers["x-nagara-signature"].partition(",v1=")
    key = hashlib.sha256(stand.key.encode()).hexdigest().encode()
    message = f"{time.removeprefix('t=')}.{id_}.200.".encode() + body
    assert hmac.compare_digest(hmac.new(key, message, hashlib.sha256).hexdigest(), signed)
    assert (await stand.get(f"/nagara/jobs/{id_}"))[0] == 200  # it can still be fetched


async def test_it_is_repeated_until_taken_also_across_a_restart(
    stand: Any, text: Any, until: Any, receiver: Receiver
) -> None:
    receiver.statuses = [500, 302, 404, 200]
    await stand.up(text(), callback_hosts=["127.0.0.1"])
    await queued(stand, "/smol/echo", receiver.url)
    await until(lambda: len(receiver.calls) == 1)

    async def called(times: int) -> None:
        async def is_so() -> bool:
            await stand.clock.advance(1)
            return len(receiver.calls) == times

        await until(is_so)

    await called(2)
    await stand.down()
    await stand.up(callback_hosts=["127.0.0.1"])
    await called(4)
    assert len({body for _, body in receiver.calls}) == 1
    await stand.down()
    await stand.up(callback_hosts=["127.0.0.1"])
    await stand.clock.advance(10)
    assert len(receiver.calls) == 4  # told: not again


async def test_nobody_is_called_for_ever(
    stand: Any, text: Any, until: Any, receiver: Receiver
) -> None:
    receiver.statuses = [410]
    await stand.up(text(), callback_hosts=["127.0.0.1"])
    await queued(stand, "/smol/echo", receiver.url)
    await until(lambda: len(receiver.calls) == 1)
    await stand.clock.advance(10)
    assert len(receiver.calls) == 1


async def test_a_request_without_an_answer_is_told_too(
    stand: Any, text: Any, until: Any, receiver: Receiver
) -> None:
    await stand.up(text(), callback_hosts=["127.0.0.1"])
    await queued(stand, "/smol/cut", receiver.url, "GET")
    await until(lambda: bool(receiver.calls))
    headers, body = receiver.calls[0]
    assert headers["x-nagara-status"] == "502"
    assert json.loads(body)["error"]["code"] == "job_failed"


async def test_hosts_that_nobody_has_named_are_refused_when_queueing(
    stand: Any, text: Any, receiver: Receiver
) -> None:
    await stand.up(text(), callback_hosts=["*.example.com", "*"])
    for address in (receiver.url, "http://169.254.169.254/latest", "http://[::1]:80/", "ftp://x/"):
        headers = {"Prefer": "respond-async", "x-nagara-callback": address}
        async with stand.client.post("/smol/echo", headers=headers) as answer:
            assert answer.status == (400 if address.startswith("ftp") else 403)
    assert receiver.calls == []


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1/", "http://127.1/", "http://2130706433/", "http://0x7f.1/", "http://10.0.0.1/",
     "http://169.254.169.254/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://0.0.0.0/",
     "http://[64:ff9b::7f00:1]/", "http://100.64.0.1/", "http://[fe80::1%25eth0]/",
     "http://224.0.0.1/", "http://198.18.0.1/"],
)  # fmt: skip
def test_addresses_inside_are_no_matter_of_patterns(address: str) -> None:
    with pytest.raises(Refusal) as refused:
        CallbackHosts(["*"]).check(address)
    assert refused.value.status in (400, 403)


@pytest.mark.parametrize(
    "address",
    ["", "x", "http://", "http:///x", "file:///etc/passwd", "http://u:p@a.example.com/",
     "http://a.example.com:99999/", "http://a b/", "http://a.example.com/\r\nx: y", "http://[::1",
     "http://a.example.com/" + "x" * 3000],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(Refusal) as refused:
        CallbackHosts(["*.example.com", "a.example.com"]).check(address)
    assert refused.value.status in (400, 403)


def test_names_are_compared_whole_and_in_any_case() -> None:
    hosts = CallbackHosts(["*.Example.com", "localhost"])
    assert hosts.check("https://A.example.COM./x#part") == "https://a.example.com./x"
    assert hosts.check("http://localhost:8000/x") == "http://localhost:8000/x"
    for address in ("http://example.com/", "http://a.example.com.evil.org/", "http://evil/"):
        with pytest.raises(Refusal):
            hosts.check(address)
    with pytest.raises(Refusal):
        CallbackHosts().check("https://a.example.com/")


def test_public_addresses_are_public() -> None:
    assert is_public("93.184.216.34")
    assert is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert not is_public("::ffff:169.254.169.254")
    assert not is_public("2002:7f00:1::")


class Names:
    """A name server whose answers change."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[Any]:
        return [{"host": address} for address in self.addresses]

    async def close(self) -> None: ...


async def test_a_name_that_means_loopback_is_not_connected_to() -> None:
    hosts = CallbackHosts(["*.example.com", "inner.example.org"])
    inner: Any = Names("127.0.0.1", "93.184.216.34", "169.254.169.254")
    resolver = CallbackResolver(hosts, inner)
    assert [one["host"] for one in await resolver.resolve("a.example.com")] == ["93.184.216.34"]
    assert len(await resolver.resolve("inner.example.org")) == 3
    inner.addresses = ("::1", "10.1.2.3")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=resolver)) as session:
        with pytest.raises(aiohttp.ClientError, match="no public address"):
            await asyncio.wait_for(session.get("http://a.example.com/"), 20)
