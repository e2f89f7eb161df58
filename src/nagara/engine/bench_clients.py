"""What runs beside a measured server, in a process of its own: `python -m ...bench_clients WHAT`.

    ask        send all `bodies` to `port` at once as streamed completions, then say their lengths
    post       post `text` to `/tokenize` of `port` over and over
    tokenize   tokenize `text` with the tokenizer of `folder` over and over, without a server

Each reads one JSON object from standard input. The clients share the machine with what is measured,
so they parse nothing that they need not understand.
"""

import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


async def ask(port: int, body: dict[str, Any]) -> int:
    """Send one completion over a raw socket; the number of its tokens.

    Raises:
        ConnectionError: the answer is no success.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + raw)
    first = await reader.readline()
    if b" 200 " not in first:
        raise ConnectionError(f"{first!r}: {(await reader.read())[-500:]!r}")
    tail = b""
    while piece := await reader.read(1 << 16):
        tail = (tail + piece)[-4096:]
    writer.close()
    name = b'"completion_tokens":'
    return int(tail[tail.rindex(name) + len(name) :].split(b",")[0].split(b"}")[0])


async def ask_all(port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    started = time.perf_counter()
    tokens = await asyncio.gather(*(ask(port, body) for body in bodies))
    return {"wall_s": time.perf_counter() - started, "tokens": tokens}


def post_for_ever(port: int, text: str) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/tokenize",
        json.dumps({"prompt": text}).encode(),
        {"Content-Type": "application/json"},
    )
    _say("posting")
    while True:
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310  a local address
            answer.read()


def tokenize_for_ever(folder: Path, text: str) -> None:
    """What the server does for a post, but for HTTP itself."""
    from nagara.engine.tokenizer import Tokenizer

    tokenizer, body = Tokenizer(folder), json.dumps({"prompt": text})
    _say("tokenizing")
    while True:
        json.dumps({"tokens": tokenizer.encode(json.loads(body)["prompt"])})


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    if sys.argv[1] == "ask":
        _say(json.dumps(asyncio.run(ask_all(asked["port"], asked["bodies"]))))
    elif sys.argv[1] == "post":
        post_for_ever(asked["port"], asked["text"])
    else:
        tokenize_for_ever(Path(asked["folder"]), asked["text"])


if __name__ == "__main__":
    main()
