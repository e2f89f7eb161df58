"""Objects over HTTP/1.1: a zone's cache server, or any origin or CDN that serves ranges.

    GET URL/TENANT/KEY    Range: bytes=START-END

Connections are kept and shared by threads; each is used by one request at a time. A stalled,
truncated, refused or overloaded answer is retried on another connection within the caller's
deadline. Only 404 and 410 mean that something is absent.
"""

import contextlib
import email.utils
import functools
import http.client
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from nagara.base.errors import UsageError
from nagara.store.errors import AbsentError, UnavailableError
from nagara.store.retrying import RefusedError, RetryPolicy
from nagara.store.statistics import TierStatistics
from nagara.store.tier import Entry, check_key
from nagara.store.timed_response import TimedResponse

T = TypeVar("T")
_IDLE_LIMIT = 64
_CONNECT_S = 5.0
_PIECE_BYTES = 1 << 18
_ABSENT = (404, 410)
_REFUSED = (400, 401, 403, 405, 411, 413, 416, 501)


class HttpTier:
    """One tenant's part of an HTTP server.

    Args:
        url: `http://host:port/path` or https; the tenant is put behind it.
        token: bearer token.
        stall_s: silence in the middle of an answer that counts as a fault.
        can_write: what was fetched from farther away is sent there.
        tls: for https; None: as the system's authorities say.
    """

    def __init__(
        self,
        url: str,
        tenant: str,
        *,
        name: str = "http",
        token: str | None = None,
        stall_s: float = 10.0,
        retries: RetryPolicy | None = None,
        can_write: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not an http address")
        self.name = name
        self.can_write = can_write
        self.statistics = TierStatistics(name)
        self._parts = parts
        self._prefix = f"{parts.path.rstrip('/')}/{tenant}/"
        self._stall_s = stall_s
        self._retries = retries or RetryPolicy()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def read(self, key: str, start: int, length: int, deadline_s: float) -> bytes:
        data = bytearray(length)
        self.read_into(key, start, memoryview(data), deadline_s)
        return bytes(data)

    def read_into(self, key: str, start: int, buffer: memoryview, deadline_s: float) -> None:
        def ask() -> int:
            return self._get(key, start, buffer, deadline_s)

        if buffer:
            self._timed(ask, lambda got: got, deadline_s)

    def read_all(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        def ask() -> bytes:
            with self._request("GET", key, {}, None, deadline_s) as response:
                if (response.length or 0) > limit_bytes:
                    raise RefusedError(f"{key} is over {limit_bytes} bytes", where=self.name)
                return self._body(response, limit_bytes, deadline_s)

        return self._timed(ask, len, deadline_s)

    def has(self, key: str, deadline_s: float) -> bool:
        def ask() -> bool:
            with self._request("HEAD", key, {}, None, deadline_s):
                return True

        try:
            return self._retries.run(ask, deadline_s)
        except AbsentError:
            return False

    def write(self, key: str, source: bytes | Path, deadline_s: float) -> None:
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}

        def ask() -> None:
            with self._request("PUT", key, headers, source, deadline_s) as response:
                response.read()

        self._retries.run(ask, deadline_s)
        self.statistics.wrote(size)

    def entries(self, prefix: str, deadline_s: float) -> Iterator[Entry]:
        raise RefusedError("an HTTP tier cannot be listed", where=self.name)

    def delete(self, key: str, deadline_s: float) -> None:
        def ask() -> None:
            request = self._request("DELETE", key, {}, None, deadline_s)
            with contextlib.suppress(AbsentError), request as response:
                response.read()

        self._retries.run(ask, deadline_s)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _timed(self, ask: Callable[[], T], size_of: Callable[[T], int], deadline_s: float) -> T:
        begun_s = time.monotonic()

        def counted() -> T:
            try:
                return ask()
            except UnavailableError:
                self.statistics.fault()
                raise

        try:
            found = self._retries.run(counted, deadline_s)
        except AbsentError:
            self.statistics.miss(time.monotonic() - begun_s)
            raise
        self.statistics.hit(size_of(found), time.monotonic() - begun_s)
        return found

    def _get(self, key: str, start: int, buffer: memoryview, deadline_s: float) -> int:
        length = len(buffer)
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        with self._request("GET", key, headers, None, deadline_s) as response:
            if response.status == 206:
                said = response.headers.get("Content-Range", "")
                if not said.startswith(f"bytes {start}-{start + length - 1}/"):
                    raise UnavailableError(f"answered with another range: {said}", where=self.name)
            elif start:
                raise RefusedError("does not serve ranges", where=self.name)
            self._fill(response, buffer, deadline_s)
            return length

    def _fill(self, response: TimedResponse, buffer: memoryview, deadline_s: float) -> None:
        """The body into the buffer, each byte moved once; less than that is an error."""
        filled = 0
        while filled < len(buffer):
            self._check_time(deadline_s)
            left = len(buffer) - filled
            if response.chunked or response.length is None:
                piece = response.read1(min(left, _PIECE_BYTES))
                got = len(piece)
                buffer[filled : filled + got] = piece
            else:
                got = response.fill(buffer[filled:])
            if not got:
                raise UnavailableError(f"ended after {filled} bytes", where=self.name)
            filled += got

    def _body(
        self, response: http.client.HTTPResponse, limit_bytes: int, deadline_s: float
    ) -> bytes:
        data = bytearray()
        while len(data) < limit_bytes:
            self._check_time(deadline_s)
            piece = response.read1(min(limit_bytes - len(data), _PIECE_BYTES))
            if not piece:
                break
            data += piece
        if response.length:
            raise UnavailableError(f"ended after {len(data)} bytes", where=self.name)
        return bytes(data)

    def _check_time(self, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise UnavailableError("did not finish in time", where=self.name)

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        source: bytes | Path | None,
        deadline_s: float,
    ) -> Iterator[TimedResponse]:
        """An answer with a good status. The connection is kept if it was read to its end."""
        check_key(key)
        address = self._prefix + urllib.parse.quote(key)
        connection = self._connection(deadline_s)
        is_reusable = False
        response = None
        try:
            with contextlib.ExitStack() as stack:
                body = (
                    stack.enter_context(source.open("rb")) if isinstance(source, Path) else source
                )
                connection.request(method, address, body, {**self._headers, **headers})
            asked_s = time.monotonic()
            response = connection.getresponse()
            assert isinstance(response, TimedResponse)
            self.statistics.answered(time.monotonic() - asked_s)
            _check_status(response, key, self.name)
            yield response
            if response.length == 0:
                response.read()  # http.client calls it finished only after one more read
            is_reusable = response.isclosed() and not response.will_close
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"{type(error).__name__}: {error}"[:200], where=f"{self.name} {self._parts.netloc}"
            ) from error
        except AbsentError:
            is_reusable = response is not None and response.isclosed() and not response.will_close
            raise
        finally:
            if is_reusable:
                self._keep(connection)
            else:
                connection.close()
                if response is not None:  # one that announced its end has the socket to itself
                    response.close()

    def _connection(self, deadline_s: float) -> http.client.HTTPConnection:
        left_s = max(0.001, deadline_s - time.monotonic())
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            host, port = self._parts.hostname or "", self._parts.port
            limit_s = min(_CONNECT_S, left_s)
            if self._tls is not None:
                connection = http.client.HTTPSConnection(
                    host, port, timeout=limit_s, context=self._tls
                )
            else:
                connection = http.client.HTTPConnection(host, port, timeout=limit_s)
            try:
                connection.connect()
            except OSError as error:
                raise UnavailableError(
                    f"cannot be reached: {error}", where=f"{self.name} {self._parts.netloc}"
                ) from error
        connection.sock.settimeout(min(self._stall_s, left_s))
        connection.response_class = functools.partial(  # type: ignore[assignment]
            TimedResponse, deadline_s=deadline_s, stall_s=self._stall_s
        )
        return connection

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_LIMIT:
                self._idle.append(connection)
                return
        connection.close()


def _check_status(response: http.client.HTTPResponse, key: str, tier: str) -> None:
    if response.status in (200, 201, 204, 206):
        return
    if response.status in _ABSENT:
        response.read(_PIECE_BYTES)
        raise AbsentError(f"{key} is not there", where=tier)
    said = f"answered {response.status} for {key}"
    if response.status in _REFUSED:
        hint = "check its token" if response.status in (401, 403) else None
        raise RefusedError(said, where=tier, hint=hint)
    wait = seconds_of(response.headers.get("Retry-After"))
    raise UnavailableError(said, where=tier, retry_after_s=wait)


def seconds_of(retry_after: str | None) -> float | None:
    """Both forms of Retry-After (RFC 9110, 10.2.3); None for nonsense."""
    if retry_after is None:
        return None
    if retry_after.isascii() and retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        when = email.utils.parsedate_to_datetime(retry_after)
        return max(0.0, when.timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return None
