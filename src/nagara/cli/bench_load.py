"""A load generator in a process of its own: requests at fixed moments, whatever the answers do.

    python -m nagara.cli.bench_load < JOB

JOB is a JSON object: `url`, `path`, `key`, `rate` (requests a second), `seconds`; with `streams`
instead of `rate`, so many event streams at once, again and again. One JSON object on standard
output: `latencies_ms` from the moment each request was due, or `delays_ms` from the sending of
each event to its arrival; `errors`.
"""

import asyncio
import contextlib
import json
import re
import sys
import time
from typing import Any
from urllib.parse import urlsplit

LIMIT_S = 30.0
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_EVENT = re.compile(rb"data: (\d+)\n\n")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Load:
    """One job at one address, over connections that are kept."""

    def __init__(self, job: dict[str, Any]) -> None:
        address = urlsplit(job["url"])
        self._host, self._port = address.hostname or "", address.port or 80
        self._seconds, self._rate = float(job["seconds"]), float(job.get("rate", 0))
        self._streams = int(job.get("streams", 0))
        head = f"GET {job['path']} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        key = job.get("key")
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._request = f"{head}{authorization}\r\n".encode()
        self._idle: list[Connection] = []
        self._latencies_ms: list[float] = []
        self._delays_ms: list[float] = []
        self._errors = 0

    async def run(self) -> dict[str, Any]:
        """All of it."""
        await (self._run_streams() if self._streams else self._run_rate())
        for _, writer in self._idle:
            writer.close()
        return {
            "latencies_ms": [round(one, 4) for one in self._latencies_ms],
            "delays_ms": [round(one, 4) for one in self._delays_ms],
            "errors": self._errors,
        }

    async def _run_rate(self) -> None:
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(int(self._rate * self._seconds)):
                due_s = begun_s + number / self._rate
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(self._one(due_s))

    async def _run_streams(self) -> None:
        end_s = time.perf_counter() + self._seconds

        async def again_and_again() -> None:
            while time.perf_counter() < end_s:
                await self._one(None)

        await asyncio.gather(*(again_and_again() for _ in range(self._streams)))

    async def _one(self, due_s: float | None) -> None:
        connection = None
        try:
            async with asyncio.timeout(LIMIT_S):
                connection = await self._connection()
                reader, writer = connection
                writer.write(self._request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise OSError(head[:80])
                if due_s is None:
                    await self._read_events(reader)
                else:
                    length = _LENGTH.search(head)
                    assert length is not None, head
                    await reader.readexactly(int(length[1]))
                    self._latencies_ms.append(1000 * (time.perf_counter() - due_s))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self._errors += 1
            if connection is not None:
                connection[1].close()
        else:
            self._idle.append(connection)

    async def _read_events(self, reader: asyncio.StreamReader) -> None:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = await reader.read(65536)
            if not piece:
                raise OSError("ended early")
            now_ns = time.monotonic_ns()
            received = received[-8:] + piece
            for match in _EVENT.finditer(piece):
                self._delays_ms.append((now_ns - int(match[1])) / 1e6)

    async def _connection(self) -> Connection:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        json.dump(asyncio.run(Load(json.load(sys.stdin)).run()), sys.stdout)
