"""Who may call: API keys for apps, one admin token for the API.

Keys are kept as SHA-256 only; the first one is also left in `api.key` beside `admin.token`, both
readable by their owner alone, so that programs of the same user need not ask for it. Keys are 256
random bits: a plain hash cannot be searched backwards, and looking one up by its hash tells
nothing of a key by the time it takes.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nagara.base.clock import Clock
from nagara.base.durable import write_durably
from nagara.control.app import DEFAULT_TENANT
from nagara.control.key_limits import NO_LIMITS, KeyLimits, KeyUse
from nagara.control.state import KeyRecord, State

TOKEN_FILE = "admin.token"  # noqa: S105 - a file's name
KEY_FILE = "api.key"


class Auth:
    """The keys in memory, the state behind them.

    Args:
        folder: where the two files lie.
        is_open: apps may be called without a key (`auth = off`).
    """

    def __init__(self, folder: Path, state: State, clock: Clock, *, is_open: bool) -> None:
        self._folder = folder
        self._state = state
        self._clock = clock
        self._keys: dict[str, KeyRecord] = {}  # by hash
        self._uses: dict[str, KeyUse] = {}  # of keys with limits, by hash
        self._tenants: dict[str, KeyUse] = {}  # of tenants with limits
        self._admin = b""
        self.is_open = is_open

    async def load(self) -> None:
        """Reads the keys; makes the admin token and the first key if there are none."""
        token_file = self._folder / TOKEN_FILE
        if not token_file.exists():
            write_durably(token_file, f"nga-{secrets.token_urlsafe(32)}\n".encode())
        self._admin = token_file.read_bytes().strip()
        self._keys = {key.sha256: key for key in await self._state.keys()}
        limits = await self._state.tenant_limits()
        self._tenants = {name: KeyUse(one, "tenant") for name, one in limits.items()}
        if not self._keys:
            _, key = await self.create("first")
            write_durably(self._folder / KEY_FILE, f"{key}\n".encode())

    def is_admin(self, token: str | None) -> bool:
        """Whether `token` is the admin token."""
        return token is not None and hmac.compare_digest(
            token.encode(errors="surrogateescape"), self._admin
        )

    def knows(self, key: str | None) -> bool:
        """Whether `key` is an API key."""
        return key is not None and _digest(key) in self._keys

    @contextmanager
    def admitted(self, key: str | None, app: str) -> Iterator[None]:
        """Meanwhile a request of the key for the app runs.

        Raises:
            Refusal: the key may not do that, or not so often.
        """
        with ExitStack() as begun:
            for use in self._bounds(key):
                use.begin(app, self._clock.monotonic_s())
                begun.callback(use.end)
            yield

    def _bounds(self, key: str | None) -> Iterator[KeyUse]:
        """The key's own and its tenant's; callers without a key of ours are the default tenant's.

        The key's come first: what it may not do is no use of its tenant's.
        """
        digest = "" if key is None else _digest(key)
        record = self._keys.get(digest)
        if record is not None and record.limits != NO_LIMITS:
            yield self._uses.setdefault(digest, KeyUse(record.limits))
        tenant = DEFAULT_TENANT if record is None else record.tenant
        if tenant in self._tenants:
            yield self._tenants[tenant]

    def tenants(self) -> dict[str, KeyLimits]:
        """The bounds of tenants that have any, and of those that have keys."""
        known = {key.tenant: NO_LIMITS for key in self._keys.values()}
        return known | {name: use.limits for name, use in self._tenants.items()}

    async def bound(self, tenant: str, limits: KeyLimits) -> None:
        """Sets the bounds of all the tenant's keys together. Requests that run are counted on."""
        await self._state.set_tenant_limits(tenant, limits)
        running = self._tenants[tenant].running if tenant in self._tenants else 0
        self._tenants[tenant] = KeyUse(limits, "tenant", running)

    def owner(self, key: str | None) -> str:
        """Who queued requests belong to: the key's hash, "" for callers without one of ours."""
        return _digest(key) if key is not None and self.knows(key) else ""

    async def create(self, name: str, limits: KeyLimits = NO_LIMITS) -> tuple[KeyRecord, str]:
        """A new key; its text is returned this once."""
        key = f"ngk-{secrets.token_urlsafe(32)}"
        record = KeyRecord(
            id=secrets.token_hex(4),
            tenant=DEFAULT_TENANT,
            name=name,
            sha256=_digest(key),
            created_s=self._clock.wall_s(),
            limits=limits,
        )
        await self._state.add_key(record)
        self._keys[record.sha256] = record
        return record, key

    def listing(self) -> list[KeyRecord]:
        """All keys, without their texts."""
        return list(self._keys.values())

    async def delete(self, id_: str) -> bool:
        """Whether there was such a key; it is refused from now on."""
        self._keys = {digest: key for digest, key in self._keys.items() if key.id != id_}
        self._uses = {digest: use for digest, use in self._uses.items() if digest in self._keys}
        return await self._state.delete_key(id_)


def bearer(authorization: str | None) -> str | None:
    """The token in an `Authorization: Bearer TOKEN` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
