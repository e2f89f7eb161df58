"""The zone cache server measured from outside: throughput to several readers, small latencies."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nagara.store.http_tier import HttpTier
from nagara.store.local import DEFAULT_TENANT
from nagara.store.names import ObjectName, name_bytes

_READERS = 8
_LARGE_BYTES = 64 << 20
_ROUNDS = 6
_SMALL_BYTES = 64 << 10
_SMALL_COUNT = 64
_REQUESTS = 2000


def measure_cache(state: Path) -> dict[str, Any]:
    """Starts a server over a state folder of its own, and reads from it over loopback."""
    script = "from nagara.cli.main import main; main()"
    state.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", script, "--state", str(state), "cache", "serve", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[-1]
            tier = HttpTier(url, DEFAULT_TENANT)
            large = _put(tier, os.urandom(_LARGE_BYTES))
            small = [
                _put(tier, hashlib.shake_128(b"%d" % number).digest(_SMALL_BYTES))
                for number in range(_SMALL_COUNT)
            ]
            result = {"readers": _READERS, "gb_s": _throughput(url, large), **_small(tier, small)}
            tier.close()
        finally:
            process.terminate()
    return result


def _put(tier: HttpTier, content: bytes) -> ObjectName:
    name = name_bytes(content)
    tier.write(name.key, content, time.monotonic() + 60)
    return name


def _throughput(url: str, name: ObjectName) -> float:
    """GB/s of all readers together; they only receive, so that the server is what is measured."""
    host, _, port = url.removeprefix("http://").partition(":")
    request = f"GET /{DEFAULT_TENANT}/{name.key} HTTP/1.1\r\nHost: x\r\n\r\n".encode()

    def read() -> None:
        buffer = bytearray(1 << 20)
        with socket.create_connection((host, int(port))) as sock:
            for _ in range(_ROUNDS):
                sock.sendall(request)
                head = b""
                while b"\r\n\r\n" not in head:
                    head += sock.recv(1)
                left = name.size
                while left:
                    left -= sock.recv_into(buffer, min(left, len(buffer)))

    threads = [threading.Thread(target=read) for _ in range(_READERS)]
    begun_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _READERS * _ROUNDS * name.size / (time.perf_counter() - begun_s) / 1e9


def _small(tier: HttpTier, names: list[ObjectName]) -> dict[str, float]:
    found = []
    for number in range(_REQUESTS):
        name = names[number % len(names)]
        begun_s = time.perf_counter()
        tier.read(name.key, 0, name.size, time.monotonic() + 60)
        found.append((time.perf_counter() - begun_s) * 1000)
    found.sort()
    return {"small_p50_ms": found[len(found) // 2], "small_p99_ms": found[int(len(found) * 0.99)]}
