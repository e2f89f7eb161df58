"""An HTTP origin as a process of its own that can be slow, stall, lie, refuse and die.

    python -m nagara.testing.origin FOLDER       prints its port, serves /KEY from the folder

Everything about its behaviour is set from outside while it runs (`Behaviour`), and it counts
what it was asked. `Origin` starts and steers one; tests and measurements use it, so that what is
measured is not in the same interpreter.
"""

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from nagara.store.http_server import ByteRange, HttpServer, Request

_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How an origin answers. Faults strike answers of at least `from_bytes` whose key has `only`.

    Args:
        latency_s: before each answer.
        link_bytes_s: all answers together go out at this rate; None is as fast as it can.
        status: answer with this status instead; with `retry_after` if that is given.
        stall_after: send so many bytes of the body, then nothing more for `stall_s`.
        truncate_after: send so many bytes of the body, then close.
        lie: flip the first byte of the body.
        times: how many answers the fault strikes, then all is well; None: all.
        drip_s: a pause after each byte.
        share: strike this share of the answers, drawn at random.
    """

    latency_s: float = 0.0
    link_bytes_s: float | None = None
    status: int | None = None
    retry_after: str | None = None
    stall_after: int | None = None
    stall_s: float = 3600.0
    truncate_after: int | None = None
    lie: bool = False
    times: int | None = None
    drip_s: float | None = None
    share: float = 1.0
    only: str = ""
    from_bytes: int = 0


class _Link:
    """A shared line of limited rate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0

    def carry(self, size_bytes: int, rate: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_s = max(now, self._free_s) + size_bytes / rate
            wait_s = self._free_s - now
        time.sleep(wait_s)


class OriginServer:
    """The server inside the origin's process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._behaviour = Behaviour()
        self._struck = 0
        self._requests: Counter[str] = Counter()
        self._bytes = 0
        self._lock = threading.Lock()
        self._link = _Link()
        self.http = HttpServer(("127.0.0.1", 0), self.handle)

    def handle(self, request: Request) -> None:
        if request.path == "/-/behaviour":
            body = b""
            while data := request.read_body(1 << 20):
                body += data
            with self._lock:
                self._behaviour, self._struck = Behaviour(**json.loads(body)), 0
            request.answer(HTTPStatus.OK)
        elif request.path == "/-/counters":
            with self._lock:
                counted = {"bytes": self._bytes, "requests": dict(self._requests)}
                if request.method == "DELETE":
                    self._bytes, self._requests = 0, Counter()
            request.answer(HTTPStatus.OK, json.dumps(counted).encode())
        else:
            self._serve(request)

    def _serve(self, request: Request) -> None:
        key = request.path.removeprefix("/")
        behaviour = self._behaviour
        with self._lock:
            self._requests[key] += 1
        time.sleep(behaviour.latency_s)
        path = self._root / key
        if not path.is_file():
            request.answer(HTTPStatus.NOT_FOUND)
            return
        size = path.stat().st_size
        part = request.range_of(size) or ByteRange(0, size, size)
        is_struck = self._strikes(behaviour, key, part.length)
        if is_struck and behaviour.status is not None:
            headers = {"Retry-After": behaviour.retry_after} if behaviour.retry_after else {}
            request.answer(HTTPStatus(behaviour.status), b"", headers)
            return
        is_part = "range" in request.headers
        headers = {"Content-Range": f"bytes {part.start}-{part.start + part.length - 1}/{size}"}
        status = HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK
        request.begin(status, part.length, headers if is_part else {})
        if request.method == "HEAD":
            return
        with path.open("rb", buffering=0) as file:
            self._send(request, file.fileno(), part, behaviour, is_struck=is_struck)

    def _strikes(self, behaviour: Behaviour, key: str, length: int) -> bool:
        with self._lock:
            if behaviour.times is not None and self._struck >= behaviour.times:
                return False
            if behaviour.only not in key or length < behaviour.from_bytes:
                return False
            if behaviour.share < 1.0 and random.random() >= behaviour.share:  # noqa: S311
                return False
            self._struck += 1
            return True

    def _send(
        self, request: Request, file: int, part: ByteRange, behaviour: Behaviour, *, is_struck: bool
    ) -> None:
        with self._lock:
            self._bytes += part.length
        if not is_struck and behaviour.link_bytes_s is None:
            request.send_file(file, part.start, part.length)
            return
        sent = 0
        while sent < part.length:
            size = 1 if is_struck and behaviour.drip_s else _PIECE_BYTES
            data = bytearray(os.pread(file, min(size, part.length - sent), part.start + sent))
            if is_struck:
                data = self._spoiled(data, sent, behaviour)
            if behaviour.link_bytes_s:
                self._link.carry(len(data), behaviour.link_bytes_s)
            request.send(bytes(data))
            sent += len(data)

    def _spoiled(self, data: bytearray, sent: int, behaviour: Behaviour) -> bytearray:
        """What a struck answer sends instead of `data`; stalls and cuts happen here."""
        if behaviour.lie and sent == 0:
            data[0] ^= 1
        if behaviour.drip_s:
            time.sleep(behaviour.drip_s)
        if behaviour.stall_after is not None:
            left = behaviour.stall_after - sent
            if left <= 0:
                time.sleep(behaviour.stall_s)
            return data[: max(left, 1)]
        if behaviour.truncate_after is not None:
            left = behaviour.truncate_after - sent
            if left <= 0:
                raise ConnectionAbortedError("cut on purpose")
            return data[:left]
        return data


class Origin:
    """A running origin process over a folder."""

    def __init__(self, root: Path, port: int, process: "subprocess.Popen[str]") -> None:
        self.root = root
        self.port = port
        self.process = process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def behave(self, behaviour: Behaviour) -> None:
        """From now on."""
        self._ask("PUT", "/-/behaviour", json.dumps(asdict(behaviour)).encode())

    def counters(self, *, reset: bool = False) -> dict[str, Any]:
        """`{"bytes": sent, "requests": {key: how often}}` since the last reset."""
        counted: dict[str, Any] = json.loads(
            self._ask("DELETE" if reset else "GET", "/-/counters", b"")
        )
        return counted

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def running_origin(root: Path) -> Iterator[Origin]:
    """Starts an origin over `root`; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nagara.testing.origin", str(root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Origin(root, int(process.stdout.readline()), process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    server = OriginServer(Path(sys.argv[1]))
    sys.stdout.write(f"{server.http.port}\n")
    sys.stdout.flush()
    server.http.run()


if __name__ == "__main__":
    main()
