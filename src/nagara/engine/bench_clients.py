"""Many clients of a server in one process of their own: `python -m nagara.engine.bench_clients`.

Reads one JSON object from standard input (`port`, `bodies`, `is_stream`), sends all bodies at once
as completions over raw sockets, and writes one JSON object: the wall time and each answer's token
count. Standard library only, and no parsing of what need not be understood: the clients share the
machine with the server that is measured.
"""

import asyncio
import json
import sys
import time
from typing import Any


async def ask(port: int, body: dict[str, Any]) -> int:
    """Send one completion; the number of its tokens.

    Raises:
        ConnectionError: the answer is no success.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + raw)
    tail = b""
    first = await reader.readline()
    if b" 200 " not in first:
        rest = await reader.read()
        raise ConnectionError(f"{first!r}: {rest[-500:]!r}")
    while piece := await reader.read(1 << 16):
        tail = (tail + piece)[-4096:]
    writer.close()
    at = tail.rfind(b'"completion_tokens":')
    return int(tail[at + 20 :].split(b",")[0].split(b"}")[0])


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    tokens = await asyncio.gather(*(ask(asked["port"], body) for body in asked["bodies"]))
    return {"wall_s": time.perf_counter() - started, "tokens": tokens}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(run(json.load(sys.stdin)))) + "\n")
