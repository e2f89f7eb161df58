"""An HTTP answer that has a deadline from its first byte on.

`http.client` waits for each byte anew: a server that drips the lines of a header, or says
`100 Continue` for ever, would keep its caller as long as it likes.
"""

import http.client
import io
import socket
import time
from typing import Any


class TimedResponse(http.client.HTTPResponse):
    """Raises TimeoutError from any read that has to wait beyond `deadline_s` (monotonic).

    Args:
        stall_s: silence that counts as a fault.
    """

    def __init__(
        self, sock: socket.socket, *arguments: Any, deadline_s: float, stall_s: float, **named: Any
    ) -> None:
        super().__init__(sock, *arguments, **named)
        assert isinstance(self.fp, io.BufferedReader)
        self.fp = io.BufferedReader(_TimedReads(self.fp.detach(), sock, deadline_s, stall_s))


class _TimedReads(io.RawIOBase):
    """A socket's stream whose every read looks at the clock."""

    def __init__(
        self, raw: io.RawIOBase, sock: socket.socket, deadline_s: float, stall_s: float
    ) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline_s = deadline_s
        self._stall_s = stall_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("did not answer in time")
        self._sock.settimeout(min(self._stall_s, left_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
