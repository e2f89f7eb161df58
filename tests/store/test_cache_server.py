import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nagara.base.errors import UsageError
from nagara.store.cache_server import CacheServer
from nagara.store.errors import AbsentError, UnavailableError
from nagara.store.http_tier import HttpTier
from nagara.store.local import ObjectFolder
from nagara.store.names import name_bytes
from nagara.store.retrying import RefusedError, RetryPolicy
from nagara.store.store import Store
from nagara.store.tier import Tier
from nagara.store.tokens import Grant, Tokens, read_tokens
from nagara.testing.objects import noise, put_object
from nagara.testing.origin import Behaviour, Origin

StoreMaker = Callable[..., Store]
GRANTS = {
    "a-reading-token-1": Grant("a"),
    "a-writing-token-1": Grant("a", write=True),
    "b-writing-token-1": Grant("b", write=True),
    "p-writing-token-1": Grant("public", write=True),
}


@contextmanager
def serving(
    folder: ObjectFolder, *tiers: Tier, tokens: Tokens | None = None
) -> Iterator[CacheServer]:
    server = CacheServer(
        folder,
        lambda tenant: Store(folder.tenant(tenant), tiers, time_limit_s=10),
        tokens or Tokens(None),
        ("127.0.0.1", 0),
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ObjectFolder]:
    opened = ObjectFolder(tmp_path / "cache")
    yield opened
    opened.close()


def client(
    server: CacheServer, tenant: str, token: str | None = None, *, write: bool = True
) -> HttpTier:
    retries = RetryPolicy(attempts=2, sleep=lambda _: None)
    url = f"http://127.0.0.1:{server.port}"
    return HttpTier(url, tenant, token=token, can_write=write, retries=retries)


def soon() -> float:
    return time.monotonic() + 20


def raw_answer(server: CacheServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        answer = b""
        # A server that has refused closes while we still write: then the end of our
        # side, or of its answer, may arrive as a reset.
        with contextlib.suppress(ConnectionError):
            sock.sendall(request)
        with contextlib.suppress(OSError):  # ENOTCONN once the reset has been seen
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(65536):
                answer += data
    return answer


def test_objects_come_through_the_cache_and_stay_there(
    folder: ObjectFolder, origin: Origin, make_store: StoreMaker
) -> None:
    contents = [noise(10), noise(5_000_000, 1), noise((64 << 20) + 5, 2)]
    names = [put_object(origin.root, content) for content in contents]
    with serving(folder, HttpTier(origin.url, "default")) as server:
        for machine in ("one", "two"):
            store = make_store(client(server, "default"), folder=machine)
            for name, content in zip(names, contents, strict=True):
                store.ensure(name)
                assert store.local.path(name).read_bytes() == content
        asked = origin.counters()["requests"]
        assert asked[f"default/{names[0].key}"] == 1
        assert asked[f"default/{names[2].key}"] == names[2].chunk_count
        origin.kill()
        third = make_store(client(server, "default"), folder="three")
        assert third.read(names[1]) == contents[1]


def test_what_nobody_has_is_404_and_what_cannot_be_asked_is_503(
    folder: ObjectFolder, origin: Origin
) -> None:
    origin.behave(Behaviour(status=503))
    name = put_object(origin.root, b"content")
    far = HttpTier(origin.url, "default", retries=RetryPolicy(attempts=1))
    with serving(folder, far) as server:
        tier = client(server, "default")
        with pytest.raises(UnavailableError):
            tier.read(name.key, 0, 7, soon())
        origin.behave(Behaviour())
        with pytest.raises(AbsentError):
            tier.read(name_bytes(b"other").key, 0, 5, soon())
        assert tier.read(name.key, 0, 7, soon()) == b"content"
        tier.close()


def test_put_objects_are_verified(folder: ObjectFolder) -> None:
    with serving(folder) as server:
        tier = client(server, "default")
        for content in (b"small", noise((64 << 20) + 1)):
            name = name_bytes(content)
            tier.write(name.key, content, soon())
            assert tier.read(name.key, 1, 3, soon()) == content[1:4]
        name = name_bytes(b"right")
        with pytest.raises(RefusedError):
            tier.write(name.key, b"wrong", soon())
        with pytest.raises(RefusedError):
            tier.write(name.key, b"right and more", soon())
        assert not tier.has(name.key, soon())
        tier.close()
    assert list(folder.tenant("default").partial.iterdir()) == []


def test_the_bound_of_the_cache_is_kept(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path / "bounded", 10 * 65536)
    with serving(folder) as server:
        tier = client(server, "default")
        for seed in range(30):
            content = noise(65536, seed)
            tier.write(name_bytes(content).key, content, soon())
            assert folder.ledger.total_bytes() <= 10 * 65536
        tier.close()
    folder.close()


def test_a_token_opens_its_tenant_and_reading_of_public(folder: ObjectFolder) -> None:
    name = name_bytes(b"secret of a")
    shared = name_bytes(b"for all")
    with serving(folder, tokens=Tokens(GRANTS)) as server:
        for tenant, token, key, content in (
            ("a", "a-writing-token-1", name.key, b"secret of a"),
            ("public", "p-writing-token-1", shared.key, b"for all"),
        ):
            tier = client(server, tenant, token)
            tier.write(key, content, soon())
            tier.close()
        may_read = {
            (tenant, token): _can_read(client(server, tenant, token), key)
            for tenant, key in (("a", name.key), ("b", name.key), ("public", shared.key))
            for token in (*GRANTS, None, "no-such-token-1234")
        }
        allowed = {pair for pair, can in may_read.items() if can}
        assert allowed == {
            ("a", "a-reading-token-1"),
            ("a", "a-writing-token-1"),
            *(("public", token) for token in GRANTS),
        }
        for tenant, token in (("a", "a-reading-token-1"), ("public", "a-writing-token-1")):
            tier = client(server, tenant, token)
            with pytest.raises(RefusedError):
                tier.write(name.key, b"secret of a", soon())
            tier.close()


def _can_read(tier: HttpTier, key: str) -> bool:
    try:
        return bool(tier.read(key, 0, 5, soon()))
    except (RefusedError, AbsentError):
        return False
    finally:
        tier.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /default/sha256/../../x HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /default/roots/images/%2e%2e HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /../x/sha256/a HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /default/other HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /default/sha256/a HTTP/1.1\r\n\r\n", b"501"),
        (b"GET /healthz\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/2.0\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\na: 1\r\na: 2\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\n folded\r\n\r\n", b"400"),
        (b"PUT /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"PUT /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"200"),
    ],
)
def test_malformed_requests_are_answered_as_such(
    folder: ObjectFolder, request_bytes: bytes, status: bytes
) -> None:
    with serving(folder) as server:
        assert raw_answer(server, request_bytes).split(b" ")[1] == status


def test_a_head_without_end_is_cut(folder: ObjectFolder) -> None:
    with serving(folder) as server:
        assert raw_answer(server, b"GET /healthz HTTP/1.1\r\nx: " + b"x" * 40000) == b""
        assert raw_answer(server, b"GET /healthz HTTP/1.1\r\n\r\n").split(b" ")[1] == b"200"


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        ("bytes=0-3", 206, b"cont"),
        ("bytes=4-", 206, b"ent"),
        ("bytes=5-100", 206, b"nt"),
        ("bytes=7-8", 416, None),
        ("bytes=3-2", 416, None),
        ("bytes=-3", 200, b"content"),  # a form we do not know is passed over
        ("lines=1-2", 200, b"content"),
    ],
)
def test_ranges(folder: ObjectFolder, asked: str, status: int, body: bytes | None) -> None:
    with serving(folder) as server:
        tier = client(server, "default")
        name = name_bytes(b"content")
        tier.write(name.key, b"content", soon())
        tier.close()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", f"/default/{name.key}", headers={"Range": asked})
        response = connection.getresponse()
        assert response.status == status
        if body is not None:
            assert response.read() == body
        connection.close()


_OUT_OF_DESCRIPTORS = """
import os, resource, socket, threading
from http import HTTPStatus
from nagara.store.http_server import HttpServer
server = HttpServer(("127.0.0.1", 0), lambda request: request.answer(HTTPStatus.OK))
threading.Thread(target=server.run, daemon=True).start()
clients = [socket.socket() for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
# A call of accept that waits has its descriptor already, so the first may still be served
for client in clients:
    client.connect(("127.0.0.1", server.port))  # by the kernel, before it is accepted
    client.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    client.settimeout(0.5)
    try:
        client.recv(1000)
    except TimeoutError:
        print("waits")
        break
for descriptor in held:
    os.close(descriptor)
client.settimeout(20)
print(client.recv(100).decode().splitlines()[0])
"""


def test_a_server_out_of_descriptors_serves_again_when_it_has_some() -> None:
    # By itself: other threads' descriptors come and go.
    command = [sys.executable, "-c", _OUT_OF_DESCRIPTORS]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.stdout.splitlines() == ["waits", "HTTP/1.1 200 OK"], said.stderr


def test_figures_are_shown(folder: ObjectFolder) -> None:
    with serving(folder, tokens=Tokens(GRANTS)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", "/stats")
        refused = connection.getresponse()
        refused.read()
        assert refused.status == 401
        connection.request("GET", "/stats", headers={"Authorization": "Bearer a-reading-token-1"})
        assert json.loads(connection.getresponse().read())["total_bytes"] == 0
        connection.close()


def test_a_token_file_is_private_and_well_formed(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(json.dumps({"a-long-enough-token": {"tenant": "a", "write": True}}))
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        read_tokens(path)
    path.chmod(0o600)
    assert read_tokens(path).may("a-long-enough-token", "a", write=True)
    for bad in ('{"short": {"tenant": "a"}}', '{"a-long-enough-token": {}}', "[]", "{"):
        path.write_text(bad)
        with pytest.raises(UsageError):
            read_tokens(path)
