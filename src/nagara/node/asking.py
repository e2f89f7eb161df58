"""Requests of the node itself to a replica: is it ready, and does it give the known answer.

On the node's event loop; the HTTP itself runs in worker threads of their own, so that replicas
which are slow to answer keep nothing else waiting.
"""

import asyncio
import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

from nagara.node.runtime import Port
from nagara.snapshot.canary import Answer, CanaryError, Question, ask, canonical

_CONNECT_S = 5.0
_READY_ANSWER_S = 30.0
_CANARY_ANSWER_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1
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


async def until_ready(port: Port, path: str) -> None:
    """Returns when a GET of `path` is answered with a 2xx. Waits for ever: bound it outside."""
    pause_s = _FIRST_PAUSE_S
    while not await _is_ready(port, path):
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


async def _is_ready(port: Port, path: str) -> bool:
    try:
        answer = await _ask(port, path, None, _READY_ANSWER_S)
    except (CanaryError, ConnectionError):
        return False
    return 200 <= answer.status < 300


async def canary_answer(port: Port, question: Question) -> str:
    """The canary's answer in the form that is kept and compared. Raises `CanaryError`."""
    try:
        answer = await _ask(port, question.path, question.body, _CANARY_ANSWER_S)
    except ConnectionError as error:
        raise CanaryError(f"{question.path}: {error}") from error
    return canonical(question, answer)


async def _ask(port: Port, path: str, body: str | None, timeout_s: float) -> Answer:
    """One request; after `timeout_s`, or cancelled, its thread is let go by ending the stream."""
    opened = await connected(port)
    handle = opened.dup()  # `opened` is the thread's to close
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                _threads, lambda: ask(opened, path, body, timeout_s=timeout_s)
            )
    except TimeoutError as error:
        raise CanaryError(f"{path}: no answer within {timeout_s:.0f} s") from error
    finally:
        with contextlib.suppress(OSError):  # not connected any more
            handle.shutdown(socket.SHUT_RDWR)
        handle.close()
