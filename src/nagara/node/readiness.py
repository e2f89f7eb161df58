"""Waiting until a replica that starts is ready, or certainly will not be. On the node's loop."""

import asyncio
import logging

from nagara.contract.replica import ReplicaSpec
from nagara.node.asking import answer_of, weights_in
from nagara.node.replica import Replica, spoken
from nagara.node.runtime import Port, Running
from nagara.snapshot.canary import CanaryError

_ANSWER_S = 30.0
_FIRST_PAUSE_S, _PAUSE_SHARE, _LONGEST_PAUSE_S = 0.01, 0.03, 1.0
_LONG_START_S = 15.0  # from then on it is said what a start waits for

_log = logging.getLogger(__name__)


async def until_ready(replica: Replica, running: Running, spec: ReplicaSpec) -> str | None:
    """None when the replica is ready; else why it will not be."""
    readiness = _Readiness(running.port, spec.ready_path, spec.app)
    ready = asyncio.create_task(readiness.reached())
    ended = asyncio.create_task(replica.ended.wait())
    try:
        await asyncio.wait(
            (ready, ended), timeout=spec.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        if not ready.done():
            ready.cancel()
        ended.cancel()
        await asyncio.wait((ready, ended))
    if replica.exit_code is not None:
        how = replica.why_ended or f"its command ended with {spoken(replica.exit_code)}"
        return f"{how} before it was ready"
    if not ready.cancelled():
        running.weights = weights_in(ready.result())
        return None
    return (
        f"{spec.ready_path} was not answered with a 2xx in {spec.start_timeout_s:.0f} s; "
        f"it {readiness.last}"
    )


class _Readiness:
    """Asks a starting replica again and again whether it is ready.

    Args:
        path: a GET of it is answered with a 2xx once it is.
        app: named when it takes long.

    `last` says how the latest try went, for whoever wonders why a start takes so long.
    """

    def __init__(self, port: Port, path: str, app: str) -> None:
        self._port = port
        self._path = path
        self._app = app
        self.last = "was not asked yet"

    async def reached(self) -> bytes:
        """What the replica answers once it is ready. Waits for ever: bound it outside.

        The pauses grow with the time that has passed, so that asking delays no start by more
        than some per cent, and a server that logs each request is not flooded for long.
        """
        clock = asyncio.get_running_loop().time
        began_s = clock()
        is_said = False
        while (answer := await self._answer()) is None:
            passed_s = clock() - began_s
            if passed_s > _LONG_START_S and not is_said:
                is_said = True
                where = f"GET {self._path}"
                _log.warning("%s: not ready for %d s: %s %s", self._app, passed_s, where, self.last)
            await asyncio.sleep(min(max(_FIRST_PAUSE_S, passed_s * _PAUSE_SHARE), _LONGEST_PAUSE_S))
        return answer

    async def _answer(self) -> bytes | None:
        """None while it is not ready."""
        try:
            answer = await answer_of(self._port, self._path, None, _ANSWER_S)
        except (CanaryError, ConnectionError) as error:
            self.last = f"cannot be asked: {error}"
            return None
        self.last = f"answers {answer.status}"
        return answer.body if 200 <= answer.status < 300 else None
