"""Who may put the engine to sleep: whoever knows the replica's token.

Behind a gateway every request comes from loopback, so an address proves nothing. The token is
looked up at each call, because a restored process has the environment of the captured one: a file
may bring the new value.
"""

import hmac
import os
from pathlib import Path

from nagara.engine.errors import RequestError

VARIABLE = "NAGARA_REPLICA_TOKEN"
FILE_VARIABLE = "NAGARA_REPLICA_TOKEN_FILE"


class ForbiddenError(RequestError):
    """The caller may not do this."""

    status = 403
    code = "forbidden"


def check_token(authorization: str | None) -> None:
    """Compare an `Authorization: Bearer ...` header with the replica's token.

    Raises:
        ForbiddenError: no token is set, or the header does not carry it.
    """
    wanted = _wanted()
    if not wanted:
        raise ForbiddenError(f"control calls are off: {VARIABLE} is not set")
    given = (authorization or "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), wanted.encode()):
        raise ForbiddenError("the control token is wrong or missing")


def _wanted() -> str:
    file = os.environ.get(FILE_VARIABLE)
    if file:
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except OSError:
            return ""
    return os.environ.get(VARIABLE, "")
