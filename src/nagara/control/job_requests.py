"""Queued invocation over HTTP: what a client sends, and where it fetches the answer."""

import asyncio
import json
import re

from aiohttp import web

from nagara.control.jobs import MAX_BODY_BYTES, Jobs
from nagara.control.refusal import Refusal, not_found

BODY_S = 60.0
CALLBACK = "x-nagara-callback"
_PLACE = re.compile(r"/nagara/jobs/(?P<id>[0-9a-f]{32})")


def is_queued(request: web.BaseRequest) -> bool:
    """Whether the client wants its answer later."""
    wishes = ",".join(request.headers.getall("Prefer", []))
    return "respond-async" in {wish.strip().lower() for wish in wishes.split(",")}


async def queue(
    jobs: Jobs, request: web.BaseRequest, app: str, owner: str, path: str,
    headers: list[tuple[str, str]], body: bytes | None,
) -> web.Response:  # fmt: skip
    """202 with the place of the answer."""
    callback = request.headers.get(CALLBACK)
    if callback is not None:
        callback = jobs.callbacks.hosts.check(callback)
    headers = [(name, value) for name, value in headers if name.lower() != CALLBACK]
    if body is None:
        body = await _read(request)
    id_ = await jobs.accept(app, owner, request.method, path, headers, body, callback)
    place = f"/nagara/jobs/{id_}"
    return web.json_response(
        {"id": id_, "state": "queued", "place": place},
        status=202, headers={"Location": place, "Preference-Applied": "respond-async"},
    )  # fmt: skip


async def answer_of(jobs: Jobs, request: web.BaseRequest, owner: str) -> web.Response:
    """GET fetches an answer, DELETE forgets a job; only with the key that queued it."""
    match = _PLACE.fullmatch(request.raw_path.partition("?")[0])
    job = None if match is None else await jobs.find(match["id"], owner)
    if job is None:
        raise not_found("there is no such queued request of this key, or it is too long ago")
    if request.method == "DELETE":
        await jobs.drop(job)
        return web.json_response({"id": job.id, "state": "forgotten"})
    if request.method not in ("GET", "HEAD"):
        raise Refusal(405, f"{request.method} is not served here", code="method_not_allowed")
    if job.state in ("queued", "running"):
        document = {"id": job.id, "state": job.state}
        return web.json_response(document, status=202, headers={"Retry-After": "1"})
    if job.state == "failed":
        raise Refusal(502, job.reason or "no answer came", code="job_failed")
    return web.Response(
        status=job.status or 200, body=job.answer, headers=json.loads(job.answer_headers or "{}")
    )


async def _read(request: web.BaseRequest) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise Refusal(413, f"a queued request has {MAX_BODY_BYTES} bytes at most",
                                  code="too_large")  # fmt: skip
    except TimeoutError:
        raise Refusal(408, "the body did not come in time", code="slow_body") from None
    return bytes(body)
