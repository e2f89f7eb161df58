"""Descriptors that the keeper holds for daemons that may die. Blocking; from any thread.

One connection a request: a descriptor then belongs to exactly one line.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from nagara.sandbox.keeper_client import KeeperError
from nagara.sandbox.unix_socket import connect

_TIME_LIMIT_S = 10.0
_LINE_LIMIT = 65536


class KeptDescriptors:
    """Requests to the keeper at one socket."""

    def __init__(self, keeper: Path) -> None:
        self._path = keeper

    def hold(self, name: str, descriptor: int) -> None:
        """Gives the keeper a duplicate, in place of an earlier one of that name."""
        self._ask({"op": "hold", "name": name}, descriptor)

    def held(self, name: str) -> int | None:
        """A duplicate of what is held; the caller closes it. None when nothing is."""
        return self._ask({"op": "held", "name": name})

    def release(self, name: str) -> None:
        """The keeper closes its one, if it has one."""
        self._ask({"op": "release", "name": name})

    def _ask(self, request: dict[str, Any], descriptor: int | None = None) -> int | None:
        line = json.dumps(request).encode() + b"\n"
        try:
            with connect(self._path, timeout_s=_TIME_LIMIT_S) as client:
                socket.send_fds(client, [line], [] if descriptor is None else [descriptor])
                answer, received = _receive(client)
        except OSError as error:
            raise KeeperError(f"cannot be reached: {error}", where=str(self._path)) from error
        if "error" in answer:
            for each in received:
                os.close(each)
            raise KeeperError(answer["error"], where=str(self._path))
        return received[0] if received else None


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data = b""
    received: list[int] = []
    while not data.endswith(b"\n"):
        part, descriptors, *_ = socket.recv_fds(client, _LINE_LIMIT, 1)
        received += descriptors
        if not part:
            raise ConnectionResetError("the keeper ended in the middle of a request")
        data += part
    answer: dict[str, Any] = json.loads(data)
    return answer, received
