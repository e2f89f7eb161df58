"""Requests of the node itself to a replica.

On the node's event loop; the HTTP itself runs in worker threads of their own, so that replicas
which are slow to answer keep nothing else waiting.
"""

import asyncio
import contextlib
import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor

from nagara.contract.replica import HookStep, WeightsRead
from nagara.node.runtime import Port
from nagara.snapshot.canary import Answer, CanaryError, Question, ask, canonical

_CONNECT_S = 5.0
_CANARY_ANSWER_S = 60.0

_threads = ThreadPoolExecutor(64, thread_name_prefix="asking a replica")


async def connected(port: Port) -> socket.socket:
    """A connected, non-blocking socket to the replica. Raises ConnectionError."""
    opened, address = port.open_socket()
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(opened, address)
    except TimeoutError as error:
        opened.close()
        raise ConnectionError(f"no connection within {_CONNECT_S:.0f} s") from error
    except BaseException:
        opened.close()
        raise
    return opened


async def canary_answer(port: Port, question: Question) -> str:
    """The canary's answer in the form that is kept and compared. Raises `CanaryError`."""
    try:
        answer = await answer_of(port, question.path, question.body, _CANARY_ANSWER_S)
    except ConnectionError as error:
        raise CanaryError(f"{question.path}: {error}") from error
    return canonical(question, answer)


async def ask_step(port: Port, step: HookStep, token: str, timeout_s: float) -> bytes:
    """A request of a hook; what it is answered with. Raises `CanaryError` unless that is a 2xx."""
    assert step.path is not None
    try:
        answer = await answer_of(
            port, step.path, step.body, timeout_s, method=step.method, token=token
        )
    except ConnectionError as error:
        raise CanaryError(f"{step.path}: {error}") from error
    if not 200 <= answer.status < 300:
        shown = answer.body[:200].decode(errors="replace")
        raise CanaryError(f"{step.path} answered {answer.status}: {shown}")
    return answer.body


def weights_in(answer: bytes) -> WeightsRead | None:
    """What nagara's engine says of its weights when it is ready, and when it wakes; of other
    servers' answers nothing is expected."""
    try:
        found = json.loads(answer)["weights"]
        read = WeightsRead(int(found["size_bytes"]), float(found["seconds"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return read if read.size_bytes >= 0 and 0 <= read.seconds < math.inf else None


async def answer_of(
    port: Port,
    path: str,
    body: str | None,
    timeout_s: float,
    *,
    method: str | None = None,
    token: str | None = None,
) -> Answer:
    """One request, a GET where there is no `body`. Raises `CanaryError`, ConnectionError.

    After `timeout_s`, or cancelled, its thread is let go by ending the stream.
    """
    opened = await connected(port)
    handle = opened.dup()  # `opened` is the thread's to close
    asked = _threads.submit(
        ask, opened, path, body, timeout_s=timeout_s, method=method, token=token
    )
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(asked)
    except TimeoutError as error:
        raise CanaryError(f"{path}: no answer within {timeout_s:.0f} s") from error
    finally:
        with contextlib.suppress(OSError):  # not connected any more
            handle.shutdown(socket.SHUT_RDWR)
        handle.close()
        if asked.cancelled():  # before its thread had begun
            opened.close()
