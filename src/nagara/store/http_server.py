"""A small HTTP/1.1 server on blocking sockets: one thread a connection, kept alive.

It knows the protocol as far as moving objects needs it: methods without a body and PUT with a
length, one range, HEAD, keep-alive, `Expect: 100-continue`. Anything else is answered with an
error, and every size and time is bounded. Who handles requests gets `Request` and answers
through it, exactly once.
"""

import contextlib
import errno
import logging
import os
import re
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

_log = logging.getLogger(__name__)
_HEAD_LIMIT_BYTES = 16384
_IDLE_S = 75.0
_STALL_S = 30.0
_SEND_BYTES = 8 << 20
_COPY_BYTES = 1 << 20
_PAUSE_S = 0.1
# What accept(2) says when the client has gone or this machine lacks something for the moment.
_PASSING = (errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.EPERM, errno.EMFILE,
            errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # fmt: skip
_METHODS = ("GET", "HEAD", "PUT", "DELETE")
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{0,19})")


class BadRequestError(Exception):
    """The client's fault; its text is the answer, and the connection is given up."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class ByteRange(NamedTuple):
    """A part of something of a known size."""

    start: int
    length: int
    size: int


class Request:
    """One request; belongs to its connection's thread."""

    def __init__(self, connection: "_Connection", method: str, target: str) -> None:
        self._connection = connection
        self.method = method
        self.path = urllib.parse.unquote(target.partition("?")[0])
        self.headers: dict[str, str] = {}
        self.body_bytes = 0
        self._unread = 0
        self.is_answered = False

    @property
    def token(self) -> str | None:
        """What stands behind `Authorization: Bearer`."""
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else None

    def range_of(self, size: int) -> ByteRange | None:
        """The part of `size` bytes that is asked for; None for all of it.

        Raises `BadRequestError` (416) when there is nothing of it.
        """
        asked = self.headers.get("range")
        match = _RANGE.fullmatch(asked) if asked is not None else None
        if match is None:
            return None  # a form we do not know is passed over, as RFC 9110 14.2 allows
        start = int(match[1])
        end = min(int(match[2]), size - 1) if match[2] else size - 1
        if start > end:
            raise BadRequestError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "nothing there")
        return ByteRange(start, end - start + 1, size)

    def read_body(self, limit: int) -> bytes:
        """The next bytes of the body; empty at its end."""
        data = self._connection.receive(min(limit, self._unread)) if self._unread else b""
        self._unread -= len(data)
        return data

    def answer(
        self, status: HTTPStatus, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole answer from memory."""
        self.begin(status, len(body), headers)
        if self.method != "HEAD":
            self._connection.send(body)

    def begin(
        self, status: HTTPStatus, length: int, headers: Mapping[str, str] | None = None
    ) -> None:
        """The head of an answer of `length` bytes, which must follow with `send...`."""
        assert not self.is_answered
        self.is_answered = True
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if self._unread or not self._connection.is_kept:
            self._connection.is_kept = False
            lines.append("Connection: close")
        is_more = length > 0 and self.method != "HEAD"
        head = "\r\n".join(lines) + "\r\n\r\n"
        self._connection.send(head.encode(), socket.MSG_MORE if is_more else 0)

    def send(self, data: bytes | memoryview) -> None:
        """A part of the body that `begin` announced."""
        self._connection.send(data)

    def send_file(self, descriptor: int, start: int, length: int) -> None:
        """A part of the body, straight from the page cache."""
        self._connection.send_file(descriptor, start, length)


Handler = Callable[[Request], None]


class _Connection:
    """One client's connection and what was read ahead of it."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self._socket = sock
        self._handler = handler
        self._ahead = bytearray()
        self._is_encrypted = isinstance(sock, ssl.SSLSocket)
        self.is_kept = True

    def serve(self) -> None:
        """Requests, one after another, until somebody closes."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self.is_kept:
            self._socket.settimeout(_IDLE_S)
            head = self._read_head()
            if head is None:
                return
            self._socket.settimeout(_STALL_S)
            request = None
            try:
                request = self._parse(head)
                self._handler(request)
            except BadRequestError as error:
                self.is_kept = False
                request = request or Request(self, "GET", "/")
                if not request.is_answered:
                    request.answer(error.status, f"{error}\n".encode())

    def receive(self, limit: int) -> bytes:
        if self._ahead:
            data = bytes(self._ahead[:limit])
            del self._ahead[:limit]
            return data
        data = self._socket.recv(min(limit, 1 << 20))
        if not data:
            raise ConnectionResetError("the client ended in the middle of a body")
        return data

    def send(self, data: bytes | memoryview, flags: int = 0) -> None:
        self._socket.sendall(data, 0 if self._is_encrypted else flags)

    def send_file(self, descriptor: int, start: int, length: int) -> None:
        end = start + length
        while self._is_encrypted and start < end:  # the kernel does not know the key
            data = os.pread(descriptor, min(end - start, _COPY_BYTES), start)
            if not data:
                raise ConnectionResetError("the file ended early")
            self._socket.sendall(data)
            start += len(data)
        while start < end:
            try:
                # The socket has a time-out and therefore does not block by itself.
                sent = os.sendfile(
                    self._socket.fileno(), descriptor, start, min(end - start, _SEND_BYTES)
                )
            except BlockingIOError:
                self._wait_writable()
                continue
            if sent == 0:
                raise ConnectionResetError("the file ended early")
            start += sent

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(_STALL_S * 1000):
            raise TimeoutError("the client does not read")

    def _read_head(self) -> bytes | None:
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            if len(self._ahead) > _HEAD_LIMIT_BYTES:
                return None
            data = self._socket.recv(_HEAD_LIMIT_BYTES)
            if not data:
                return None
            self._ahead += data
        head = bytes(self._ahead[:end])
        del self._ahead[: end + 4]
        return head

    def _parse(self, head: bytes) -> Request:
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise BadRequestError(HTTPStatus.BAD_REQUEST, "not HTTP/1.1")
        if parts[0] not in _METHODS:
            raise BadRequestError(HTTPStatus.NOT_IMPLEMENTED, "no such method")
        request = Request(self, parts[0], parts[1])
        for line in lines:
            name, colon, value = line.partition(":")
            key = name.lower()
            if not colon or not name or name != name.strip() or key in request.headers:
                raise BadRequestError(HTTPStatus.BAD_REQUEST, "a malformed or repeated header")
            request.headers[key] = value.strip()
        if "transfer-encoding" in request.headers:
            raise BadRequestError(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length")
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise BadRequestError(HTTPStatus.BAD_REQUEST, "a malformed Content-Length")
        request.body_bytes = request._unread = int(length)
        wish = request.headers.get("connection", "").lower()
        self.is_kept = wish != "close" and parts[2] == "HTTP/1.1"
        if request.headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return request


class HttpServer:
    """Accepts connections until `close`.

    Args:
        address: host and port; port 0 takes a free one.
        connections: how many are served at once; more wait to be accepted.
        tls: None: without encryption.
    """

    def __init__(
        self,
        address: tuple[str, int],
        handler: Handler,
        connections: int = 256,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=512)
        self._handler = handler
        self._tls = tls
        self._free = threading.Semaphore(connections)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def run(self) -> None:
        """Accepts in this thread until `close` is called from another one."""
        while not self._is_closed:
            self._free.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                self._free.release()
                if self._is_closed:
                    return
                if error.errno not in _PASSING:
                    raise
                _log.warning("a connection could not be accepted: %s", error.strerror)
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def close(self) -> None:
        """Stops accepting and cuts what is open."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _secured(self, sock: socket.socket) -> socket.socket:
        if self._tls is None:
            return sock
        sock.settimeout(_STALL_S)
        secured = self._tls.wrap_socket(sock, server_side=True)  # it has taken `sock` over
        with self._lock:
            self._open.add(secured)
        return secured

    def _serve(self, sock: socket.socket) -> None:
        served = sock
        try:
            with sock, self._secured(sock) as served:
                _Connection(served, self._handler).serve()
        except OSError as error:  # the client went away or was too slow
            _log.debug("a connection ended: %s", error)
        except Exception:  # noqa: BLE001 - the thread's root: one request must not end the server
            _log.exception("a request failed")
        finally:
            with self._lock:
                self._open -= {sock, served}
            self._free.release()
