"""Who may read and write which tenant's objects on a cache server.

A file, mode 0600, of JSON: {"TOKEN": {"tenant": "a", "write": true}, ...}. A token opens its own
tenant, and reading of `public`. Looked up by hash, so that no comparison takes longer for a
token that is nearly right.
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import UsageError
from nagara.store.local import PUBLIC_TENANT, check_tenant

_LEAST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token opens."""

    tenant: str
    write: bool = False


class Tokens:
    """The tokens of one server. With `grants` None everybody may do everything.

    Args:
        member: opens everything: shown by the machines of a cluster.
    """

    def __init__(self, grants: Mapping[str, Grant] | None, *, member: str | None = None) -> None:
        self._is_open = grants is None
        self._member = None if member is None else _digest(member)
        self._grants = {_digest(token): grant for token, grant in (grants or {}).items()}

    def may(self, token: str | None, tenant: str, *, write: bool) -> bool:
        """The bearer of `token` may do that to that tenant's objects."""
        if self._is_open or self._is_member(token):
            return True
        grant = self._grants.get(_digest(token)) if token else None
        if grant is None:
            return False
        if grant.tenant == tenant:
            return grant.write or not write
        return tenant == PUBLIC_TENANT and not write

    def knows(self, token: str | None) -> bool:
        """It is somebody's token."""
        if self._is_open or self._is_member(token):
            return True
        return token is not None and _digest(token) in self._grants

    def _is_member(self, token: str | None) -> bool:
        return token is not None and self._member is not None and _digest(token) == self._member


def read_tokens(path: Path) -> Tokens:
    """Raises `UsageError` for a file that others may read, or that is no token file."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UsageError("others may read the tokens", where=str(path), hint="chmod 600 it")
        document = json.loads(path.read_bytes())
        grants = {token: Grant(**grant) for token, grant in document.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"is no token file: {error}", where=str(path)) from error
    for token, grant in grants.items():
        check_tenant(grant.tenant)
        if len(token) < _LEAST_LENGTH or not token.isascii() or not token.isprintable():
            raise UsageError(
                f"a token has to have {_LEAST_LENGTH} or more printable characters", where=str(path)
            )
    return Tokens(grants)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
