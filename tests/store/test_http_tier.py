import contextlib
import socket
import threading
import time
from email.utils import formatdate

import pytest

from nagara.base.errors import UsageError
from nagara.store.errors import AbsentError, BadNameError, UnavailableError
from nagara.store.http_tier import HttpTier, seconds_of
from nagara.store.retrying import RefusedError, RetryPolicy
from nagara.testing.objects import noise, put_object
from nagara.testing.origin import Behaviour, Origin


class Patience:
    """A policy's clock: waiting costs nothing and is written down."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def policy(self, attempts: int = 4) -> RetryPolicy:
        return RetryPolicy(attempts=attempts, sleep=self.pauses.append, draw=lambda: 1.0)


def soon() -> float:
    return time.monotonic() + 20


def tier_of(origin: Origin, patience: Patience | None = None, stall_s: float = 0.3) -> HttpTier:
    retries = (patience or Patience()).policy()
    return HttpTier(origin.url, "default", stall_s=stall_s, retries=retries)


@pytest.mark.parametrize(
    "fault",
    [
        Behaviour(stall_after=100_000, times=1),
        Behaviour(truncate_after=100_000, times=1),
        Behaviour(truncate_after=0, times=2),
        Behaviour(status=503, times=3),
        Behaviour(status=500, times=1),
    ],
)
def test_a_fault_in_the_middle_is_retried_and_the_bytes_are_right(
    origin: Origin, fault: Behaviour
) -> None:
    content = noise(400_000)
    name = put_object(origin.root, content)
    origin.behave(fault)
    tier = tier_of(origin)
    assert tier.read(name.key, 0, name.size, soon()) == content
    assert tier.read(name.key, 1000, 5, soon()) == content[1000:1005]
    assert tier.statistics.report().faults == fault.times
    tier.close()


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_for_ever_ends_after_a_bounded_number_of_questions(
    origin: Origin, status: int
) -> None:
    name = put_object(origin.root, b"content")
    origin.behave(Behaviour(status=status))
    patience = Patience()
    with pytest.raises(UnavailableError):
        tier_of(origin, patience).read(name.key, 0, 7, soon())
    assert origin.counters()["requests"] == {f"default/{name.key}": 4}
    assert patience.pauses == pytest.approx([0.05, 0.1, 0.2])


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_kept(origin: Origin, form: str) -> None:
    name = put_object(origin.root, b"content")
    after = "7" if form == "seconds" else formatdate(time.time() + 8, usegmt=True)
    origin.behave(Behaviour(status=429, retry_after=after, times=1))
    patience = Patience()
    tier = tier_of(origin, patience)
    assert tier.read(name.key, 0, 7, soon()) == b"content"
    tier.close()
    assert 5 < patience.pauses[0] <= 8


def test_a_wait_that_does_not_fit_into_the_deadline_ends_at_once(origin: Origin) -> None:
    name = put_object(origin.root, b"content")
    origin.behave(Behaviour(status=429, retry_after="3600"))
    patience = Patience()
    with pytest.raises(UnavailableError):
        tier_of(origin, patience).read(name.key, 0, 7, soon())
    assert patience.pauses == []


def test_an_answer_that_drips_ends_at_the_deadline(origin: Origin) -> None:
    name = put_object(origin.root, noise(1000))
    origin.behave(Behaviour(drip_s=0.05))
    begun_s = time.monotonic()
    with pytest.raises(UnavailableError):
        tier_of(origin).read(name.key, 0, 1000, begun_s + 0.5)
    assert time.monotonic() - begun_s < 20


def test_only_not_found_means_absent(origin: Origin) -> None:
    name = put_object(origin.root, b"content")
    tier = tier_of(origin)
    with pytest.raises(AbsentError):
        tier.read(name.key + "0", 0, 5, soon())
    assert not tier.has(name.key + "0", soon())
    assert tier.has(name.key, soon())
    origin.behave(Behaviour(status=403))
    with pytest.raises(RefusedError):
        tier.read(name.key, 0, 7, soon())
    origin.kill()
    with pytest.raises(UnavailableError):
        tier.read(name.key, 0, 7, soon())
    tier.close()


def test_connections_are_used_again(origin: Origin) -> None:
    name = put_object(origin.root, b"content")
    tier = tier_of(origin)
    for _ in range(20):
        tier.read(name.key, 0, 7, soon())
        with pytest.raises(AbsentError):
            tier.read(name.key + "0", 0, 7, soon())
        tier.has(name.key, soon())
    assert len(tier._idle) == 1
    tier.close()


def test_a_connection_that_the_server_closed_meanwhile_is_replaced(origin: Origin) -> None:
    name = put_object(origin.root, b"content")
    tier = tier_of(origin)
    tier.read(name.key, 0, 7, soon())
    for connection in tier._idle:
        connection.sock.shutdown(2)
    assert tier.read(name.key, 0, 7, soon()) == b"content"
    tier.close()


@pytest.mark.parametrize("key", ["../x", "sha256/../x", "sha256//x", "/etc/passwd", "other/x", ""])
def test_a_key_cannot_leave_its_place(origin: Origin, key: str) -> None:
    with pytest.raises(BadNameError):
        tier_of(origin).read(key, 0, 1, soon())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "x", ""])
def test_an_address_is_http(url: str) -> None:
    with pytest.raises(UsageError):
        HttpTier(url, "default")


class Dripping:
    """A server that never ends the beginning of an answer: it repeats a piece of it."""

    def __init__(self, first: bytes, piece: bytes) -> None:
        self._first, self._piece = first, piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Dripping":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(self._first)
                while True:
                    connection.sendall(self._piece)
                    time.sleep(0.005)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1"),
    ],
)
def test_an_answer_that_drips_for_ever_ends_at_the_deadline(first: bytes, piece: bytes) -> None:
    with Dripping(first, piece) as server:
        tier = HttpTier(server.url, "default", retries=Patience().policy())
        with pytest.raises(UnavailableError):
            tier.read("sha256/x", 0, 100_000, time.monotonic() + 0.4)
        with pytest.raises(UnavailableError):
            tier.read_all("sha256/x", 100_000, time.monotonic() + 0.4)
        tier.close()


@pytest.mark.parametrize(
    "header", ["²", "-5", "soon", "9" * 400, "Mon, 01 Jan 0001 00:00:00 -0000", ""]
)
def test_a_wait_that_makes_no_sense_is_none(header: str) -> None:
    wait_s = seconds_of(header)
    assert wait_s is None or wait_s >= 0
