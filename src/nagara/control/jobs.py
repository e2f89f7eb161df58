"""Queued invocation: a request that is answered later, for work that takes long.

`Prefer: respond-async` → 202 and a place where the answer will be. The request is written down
before it is accepted, waits for a replica as long as it has to, survives restarts of control, and
its answer is kept for a day. It is carried out once: again only if nothing of it was sent, or if
its method says that repeating does no harm. Runs as tasks on the loop.

    queued ─▶ running ─▶ done      the replica's answer, whatever its status
       ▲         │  └──▶ failed    no answer came, and it may have been carried out
       └─────────┘ nothing was sent

Whoever gave an address is told of either end: `callbacks`.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import aiohttp
from yarl import URL

from nagara.base.clock import Clock
from nagara.control.app import App
from nagara.control.callbacks import Callbacks
from nagara.control.dispatch import Dispatcher, Grant
from nagara.control.errors import ControlError
from nagara.control.headers import IDEMPOTENT
from nagara.control.job_record import Job, JobRecord
from nagara.control.refusal import Refusal
from nagara.control.tasks import Tasks
from nagara.control.upstream import DialError

MAX_BODY_BYTES = 16 * 2**20
MAX_WAITING = 10_000
KEPT_S = 24 * 3600.0
_TRIES = 3
_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Service(Protocol):
    """What is needed of a deployed app."""

    @property
    def app(self) -> App: ...
    @property
    def dispatcher(self) -> Dispatcher: ...


class Jobs:
    """All queued requests.

    Args:
        broken: told when a replica could not be reached, as the gateway tells it.
    """

    def __init__(
        self,
        record: JobRecord,
        services: Mapping[str, Service],
        broken: Any,
        clock: Clock,
        tasks: Tasks,
        callbacks: Callbacks,
    ) -> None:
        self.callbacks = callbacks
        self._record = record
        self._services = services
        self._broken = broken
        self._clock = clock
        self._tasks = tasks
        self._running: dict[str, asyncio.Task[None]] = {}

    async def begin(self) -> None:
        """Goes on with what an earlier process left. What it had sent may have been done."""
        for job in await self._record.unended():
            if job.state == "running" and job.method not in IDEMPOTENT:
                reason = "nagara was restarted while it ran; whether it was done is not known"
                await self._record.end(job.id, "failed", reason=reason)
            else:
                self._spawn(job)
        await self.callbacks.begin()

    async def accept(
        self, app: str, owner: str, method: str, path: str, headers: list[tuple[str, str]],
        body: bytes, callback: str | None = None,
    ) -> str:  # fmt: skip
        """Writes a request down and begins it; its id.

        Args:
            callback: an address that `callbacks.hosts` has found to be good.

        Raises:
            Refusal: too many wait, or it cannot be written down.
        """
        if len(self._running) >= MAX_WAITING:
            raise Refusal(429, f"{len(self._running)} requests are queued already",
                          code="queue_full", retry_after_s=60.0)  # fmt: skip
        job = Job(
            secrets.token_hex(16), app, owner, "queued", method, path, tuple(headers), body,
            self._clock.wall_s(), callback,
        )  # fmt: skip
        try:
            await self._record.add(job)
        except ControlError as error:
            raise Refusal(503, f"it cannot be written down: {error.what}", code="not_recorded",
                          retry_after_s=5.0) from error  # fmt: skip
        self._spawn(job)
        return job.id

    async def find(self, id_: str, owner: str) -> Job | None:
        """A job of this owner, with its answer if it has one."""
        job = await self._record.find(id_)
        return job if job is not None and job.owner == owner else None

    async def drop(self, job: Job) -> None:
        """Forgets a job; one that runs is cut off."""
        task = self._running.get(job.id)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        await self._record.drop(job.id)

    def _spawn(self, job: Job) -> None:
        task = self._tasks.spawn(partial(self._run, job), f"job {job.id}")
        self._running[job.id] = task
        task.add_done_callback(lambda _: self._running.pop(job.id, None))

    async def _run(self, job: Job) -> None:
        """Until there is an answer, or none can come."""
        await self._until_ended(job)
        if job.callback is not None:
            self.callbacks.tell(job.id)

    async def _until_ended(self, job: Job) -> None:
        failures = 0
        while True:
            if self._clock.wall_s() - job.created_s > KEPT_S:
                await self._record.end(job.id, "failed", reason="no replica was free for a day")
                return
            service = self._services.get(job.app)
            if service is None:
                await self._record.end(job.id, "failed", reason="its app was deleted")
                return
            try:
                await self._once(job, service)
            except Refusal as refusal:  # nothing was sent: it can wait
                await self._clock.sleep(refusal.retry_after_s or _RETRY_S)
            except DialError as error:
                _log.warning("job %s: %s", job.id, error)
                await self._clock.sleep(_RETRY_S)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                failures += 1
                if job.method not in IDEMPOTENT or failures >= _TRIES:
                    reason = f"the replica broke off: {error or type(error).__name__}"
                    await self._record.end(job.id, "failed", reason=reason)
                    return
            else:
                return

    async def _once(self, job: Job, service: Service) -> None:
        dispatcher = service.dispatcher
        arrived_s = self._clock.monotonic_s()
        dispatcher.demand.enter(arrived_s)
        try:
            # Its body is in the state already; what waits here is small.
            grant = await dispatcher.acquire(0, arrived_s=arrived_s)
            try:
                await self._exchange(job, grant, service.app.timeouts.request_s)
                grant.endpoint.has_answered = True
            except DialError as error:
                if not (error.is_node_away and dispatcher.pause(grant.endpoint)):
                    self._broken(job.app, grant.endpoint.replica, error.what)
                raise
            finally:
                dispatcher.release(grant.endpoint)
        finally:
            dispatcher.demand.leave(self._clock.monotonic_s())

    async def _exchange(self, job: Job, grant: Grant, limit_s: float) -> None:
        await self._record.set_running(job.id)
        url = URL(f"http://{grant.endpoint.replica}{job.path}", encoded=True)
        session = grant.endpoint.upstream.session
        async with (
            asyncio.timeout(limit_s),
            session.request(
                job.method, url, headers=job.headers, data=job.body or None, allow_redirects=False
            ) as answer,
        ):
            content = bytearray()
            async for piece in answer.content.iter_any():
                content += piece
                if len(content) > MAX_BODY_BYTES:
                    reason = f"its answer has more than {MAX_BODY_BYTES} bytes"
                    await self._record.end(job.id, "failed", reason=reason)
                    return
            kind = answer.headers.get("Content-Type", "application/octet-stream")
            headers = {"Content-Type": kind}
            if coding := answer.headers.get("Content-Encoding"):
                headers["Content-Encoding"] = coding
        await self._record.end(
            job.id, "done", status=answer.status, headers=json.dumps(headers), answer=bytes(content)
        )
