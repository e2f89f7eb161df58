"""A server for measuring what stands before it: quick, small, standard library only.

python -m nagara.cli.bench_upstream PORT

GET /health   at once
GET /fast     at once
GET /wait     after 20 ms
GET /stream   50 server-sent events 10 ms apart; each is the moment it was sent, in
              nanoseconds of the clock that all processes of a machine share
"""

import asyncio
import sys
import time

WAIT_S = 0.020
EVENTS, EVENT_S = 50, 0.010
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"
_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class _Connection(asyncio.Protocol):
    """One kept-alive connection; requests without a body, one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, self._received = self._received.split(b"\r\n\r\n", 1)
            self._answer(head.split(b" ", 2)[1].partition(b"?")[0])

    def _answer(self, path: bytes) -> None:
        if path == b"/wait":
            asyncio.get_running_loop().call_later(WAIT_S, self._transport.write, _OK)
        elif path == b"/stream":
            self._transport.write(_STREAM)
            self._event(EVENTS)
        else:
            self._transport.write(_OK)

    def _event(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(b"0\r\n\r\n")
            return
        event = b"data: %d\n\n" % time.monotonic_ns()
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        asyncio.get_running_loop().call_later(EVENT_S, self._event, left - 1)


async def serve(host: str, port: int) -> None:
    """Serves for ever; says its port on standard output."""
    server = await asyncio.get_running_loop().create_server(_Connection, host, port, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve("127.0.0.1", int(sys.argv[1])))
