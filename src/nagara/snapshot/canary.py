"""The request whose known answer a restored replica must give. Blocking: worker threads only.

Of an OpenAI server's answer the first token's logprob is kept too, where the request asks for it.
Wrong weights can still give the same few words; the same probability of the first of them they
cannot give.
"""

import http.client
import json
import math
import socket
from dataclasses import dataclass
from typing import Any

# Above what the same weights differ by when a batch is computed in another order, far below what
# other weights do.
LOGPROB_TOLERANCE = 0.05
# A server that never ends its answer shall not take the machine's memory.
ANSWER_LIMIT_BYTES = 16 << 20


class CanaryError(Exception):
    """The canary request got no usable answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """The canary request and how its answers compare.

    `is_openai`: only what a greedy request determines counts (texts, finish reasons and, within a
    tolerance, the first logprob; not ids and times). Otherwise status and body must be equal byte
    for byte.
    """

    path: str
    body: str | None = None  # JSON text; None sends a GET
    is_openai: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back to one HTTP request."""

    status: int
    body: bytes


class _OverSocket(http.client.HTTPConnection):
    """HTTP over a socket that somebody else has connected."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        connected.settimeout(timeout_s)
        self.sock = connected


def ask(
    connected: socket.socket,
    path: str,
    body: str | None = None,
    *,
    timeout_s: float,
    method: str | None = None,
    token: str | None = None,
) -> Answer:
    """One request over a connected socket, which is closed afterwards.

    A body is sent as JSON by POST; without one it is a GET; `method` names another. Raises
    `CanaryError`.
    """
    headers = {"connection": "close"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    if body is not None:
        headers["content-type"] = "application/json"
    connection = _OverSocket(connected, timeout_s)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        response = connection.getresponse()
        said = response.read(ANSWER_LIMIT_BYTES + 1)
        if len(said) > ANSWER_LIMIT_BYTES:
            raise CanaryError(f"{path}: an answer of more than {ANSWER_LIMIT_BYTES} bytes")
        if response.length:  # not said by a read of so many bytes at most
            raise http.client.IncompleteRead(said, response.length)
        return Answer(response.status, said)
    except (OSError, http.client.HTTPException) as error:
        raise CanaryError(f"{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def canonical(question: Question, answer: Answer) -> str:
    """The part of an answer that must be the same each time, as text to keep and compare.

    Raises:
        CanaryError: the answer is an error or not of the kind announced.
    """
    if not 200 <= answer.status < 300:
        shown = answer.body[:200].decode(errors="replace")
        raise CanaryError(f"{question.path} answered {answer.status}: {shown}")
    if not question.is_openai:
        return f"{answer.status} {answer.body.decode(errors='backslashreplace')}"
    try:
        choices = json.loads(answer.body)["choices"]
        return json.dumps([_determined(choice) for choice in choices], sort_keys=True)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CanaryError(f"{question.path} gave no OpenAI answer: {error!r}") from error


def agree(question: Question, recorded: str, answer: str) -> bool:
    """Whether two answers, in the form that `canonical` gives, are the same."""
    if not question.is_openai:
        return recorded == answer
    try:
        first, second = json.loads(recorded), json.loads(answer)
        logprobs = [
            [choice.pop("first_logprob", None) for choice in one] for one in (first, second)
        ]
    except (ValueError, TypeError, AttributeError):  # what was recorded is no such answer
        return False
    return first == second and all(map(_is_near, *logprobs))


def _is_near(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=0.0, abs_tol=LOGPROB_TOLERANCE)


def _determined(choice: dict[str, Any]) -> dict[str, Any]:
    """Text, finish reason and first logprob; ids and times differ from call to call."""
    kept = {"finish_reason": choice.get("finish_reason")}
    if "text" in choice:
        kept["text"] = choice["text"]
    else:
        kept["content"] = choice["message"]["content"]
    if (logprob := _first_logprob(choice.get("logprobs"))) is not None:
        kept["first_logprob"] = logprob
    return kept


def _first_logprob(logprobs: dict[str, Any] | None) -> float | None:
    """Of the first token, in the older shape (`token_logprobs`) or the newer one (`content`)."""
    if not logprobs:
        return None
    if older := logprobs.get("token_logprobs"):
        return float(older[0])
    if newer := logprobs.get("content"):
        return float(newer[0]["logprob"])
    return None
