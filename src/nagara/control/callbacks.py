"""Tells those who asked to be called back that a queued request has been answered.

A POST of the answer to the address they gave, signed, and repeated until it is taken: any 2xx takes
it, 410 says that nobody wants it. What is still to be told is in the state, so that a restart loses
none; a receiver may be told twice. Redirects are not followed. Tasks on the loop.

    x-nagara-job        the id of the queued request
    x-nagara-status     the answer's status; 502 when no answer came, with the reason as the body
    x-nagara-signature  t=TIME,v1=HEX: HMAC-SHA256 of "TIME.ID.STATUS." and the body
                        under the hexadecimal SHA-256 of the API key that queued it
"""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable
from functools import partial

import aiohttp

from nagara.base.clock import Clock
from nagara.control.callback_hosts import CallbackHosts, CallbackResolver
from nagara.control.job_record import Job, JobRecord
from nagara.control.refusal import Refusal
from nagara.control.tasks import Tasks

PAUSES_S = (1.0, 5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0)
ANSWER_S = 30.0
AT_ONCE = 16
_GONE = 410

_log = logging.getLogger(__name__)


class Callbacks:
    """All that is to be told.

    Args:
        hosts: who may be called; asked again at each attempt, since the list may have changed.
        connector: makes connections; for tests.
    """

    def __init__(
        self,
        record: JobRecord,
        hosts: CallbackHosts,
        clock: Clock,
        tasks: Tasks,
        connector: Callable[[], aiohttp.BaseConnector] | None = None,
    ) -> None:
        self._record = record
        self.hosts = hosts
        self._clock = clock
        self._tasks = tasks
        self._connector = connector or self._tcp
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def begin(self) -> None:
        """Goes on with what an earlier process has not told."""
        for id_ in await self._record.untold():
            self.tell(id_)

    def tell(self, id_: str) -> None:
        """The request has ended: whoever waits for it is called."""
        self._tasks.spawn(partial(self._tell, id_), f"callback {id_}")

    async def _tell(self, id_: str) -> None:
        for pause_s in (*PAUSES_S, None):
            job = await self._record.find(id_)
            if job is None or job.callback is None:  # forgotten meanwhile
                return
            async with self._slots:
                failure = await self._attempt(job, job.callback)
            if failure is None:
                await self._record.told(id_, "told")
                return
            _log.warning("job %s: its callback failed: %s", id_, failure)
            if failure == _NOBODY or pause_s is None:
                break
            await self._clock.sleep(pause_s)
        await self._record.told(id_, "given up")

    async def _attempt(self, job: Job, address: str) -> str | None:
        """None when it was taken, else why not."""
        status, headers, body = _content(job)
        time_s = int(self._clock.wall_s())
        headers |= {"x-nagara-job": job.id, "x-nagara-status": str(status)}
        if job.owner:
            signed = signature(job.owner, time_s, job.id, status, body)
            headers["x-nagara-signature"] = f"t={time_s},v1={signed}"
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            url = self.hosts.check(address)
            async with (
                aiohttp.ClientSession(connector=self._connector(), timeout=timeout) as session,
                session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                if 200 <= answer.status < 300:
                    return None
                return _NOBODY if answer.status == _GONE else f"it answered {answer.status}"
        except Refusal as refusal:
            return refusal.message
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__

    def _tcp(self) -> aiohttp.BaseConnector:
        resolver = CallbackResolver(self.hosts)
        return aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)


_NOBODY = "it answered 410: nobody wants it"


def signature(owner: str, time_s: int, id_: str, status: int, body: bytes) -> str:
    """What `v1=` says."""
    signed = f"{time_s}.{id_}.{status}.".encode() + body
    return hmac.new(owner.encode(), signed, hashlib.sha256).hexdigest()


def _content(job: Job) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body that its caller would have had."""
    if job.state == "done":
        headers: dict[str, str] = json.loads(job.answer_headers or "{}")
        return job.status or 200, headers, job.answer or b""
    refusal = Refusal(502, job.reason or "no answer came", code="job_failed")
    return 502, {"Content-Type": "application/json"}, json.dumps(refusal.body()).encode()
