"""An HTTP answer that has a deadline from its first byte on.

`http.client` waits for each byte anew: a server that drips the lines of a header, or says
`100 Continue` for ever, would keep its caller as long as it likes.
"""

import http.client
import io
import socket
import ssl
import struct
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
        self._timed = _TimedReads(self.fp.detach(), sock, deadline_s, stall_s)
        self.fp = io.BufferedReader(self._timed)

    def fill(self, buffer: memoryview) -> int:
        """The next bytes of a body of known length, as many as come without a fault; each is moved
        once. 0 at its end.

        The kernel is asked for all of them at once: to be woken for every few costs more than to
        copy them. Raises TimeoutError.
        """
        assert self.length is not None
        wanted = buffer[: min(len(buffer), self.length)]
        if not wanted:
            return 0
        filled: int = self.fp.readinto1(wanted)  # what came with the head; afterwards none is kept
        if 0 < filled < len(wanted):
            filled += self._timed.fill(wanted[filled:])
        self.length -= filled
        return filled


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

    def fill(self, buffer: memoryview) -> int:
        """As many bytes as come before the other side ends or is silent for too long."""
        if isinstance(self._sock, ssl.SSLSocket):
            return self.readinto(buffer) or 0
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("did not answer in time")
        self._sock.settimeout(None)
        wait_us = int(min(self._stall_s, left_s) * 1e6) or 1  # 0 would be for ever
        wait = struct.pack("@ll", *divmod(wait_us, 10**6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        try:
            return self._sock.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("is silent in the middle of an answer") from None

    def close(self) -> None:
        self._raw.close()
        super().close()
