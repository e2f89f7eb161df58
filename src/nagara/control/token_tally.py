"""How many tokens an OpenAI server answers, counted while the answer passes. Pure."""

import re
from collections.abc import Mapping

_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_OVERLAP_BYTES = 48  # of the usage's text, which may lie across two pieces


class TokenTally:
    """Counts the tokens of one answer of an OpenAI server while its pieces pass.

    What the answer says itself (`usage`) counts. Until it says so, and if it never does, each
    event of a stream counts as one token: the number is then near, not exact.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        is_plain = headers.get("Content-Encoding", "identity").lower() == "identity"
        self._is_stream = is_plain and kind == "text/event-stream"
        self._is_counted = self._is_stream or (is_plain and kind == "application/json")
        self._tail = b""
        self._events = 0
        self._told = 0

    def take(self, piece: bytes) -> int:
        """The tokens that this piece adds to those counted before."""
        if not self._is_counted:
            return 0
        text = self._tail + piece
        before = max(self._events, self._told)
        if self._is_stream:
            self._events += text.count(b"data: {") - self._tail.count(b"data: {")
        for told in _USAGE.finditer(text):
            # A number at the very end may go on in the next piece, and is then seen again.
            self._told = max(self._told, int(told[1])) if told.end() < len(text) else self._told
        self._tail = text[-_OVERLAP_BYTES:]
        return max(self._events, self._told) - before
