"""Answers that the gateway and the API give on their own account, in OpenAI's error shape."""

import json
import math

from aiohttp import web


class Refusal(Exception):  # noqa: N818 - an answer, not a fault of ours
    """An HTTP answer other than the one asked for.

    Args:
        status: HTTP status.
        message: what a person should read.
        code: a word programs may compare.
        retry_after_s: when it may be different; sent as `Retry-After`, rounded up.
    """

    def __init__(
        self, status: int, message: str, *, code: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """The refusal as an HTTP answer."""
        extra = dict(headers or {})
        if self.retry_after_s is not None:
            extra["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            extra["WWW-Authenticate"] = "Bearer"
        return web.Response(
            status=self.status,
            body=json.dumps(self.body()).encode(),
            content_type="application/json",
            headers=extra,
        )

    def body(self) -> dict[str, object]:
        """`{"error": {...}}` as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 401:
            kind = "authentication_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return {"error": error}


def unauthorised(what: str) -> Refusal:
    """401: `what` is missing or wrong."""
    return Refusal(401, f"{what} is missing or wrong", code="invalid_api_key")


def not_found(message: str) -> Refusal:
    """404."""
    return Refusal(404, message, code="not_found")


def bad_request(message: str) -> Refusal:
    """400."""
    return Refusal(400, message, code="bad_request")
