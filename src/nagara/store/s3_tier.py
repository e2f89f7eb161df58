"""Objects in an S3-compatible bucket, through the library `obstore` (extra `s3`).

The library signs, keeps connections and does its own short retries; ours bound the whole.
Called from any thread.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nagara.base.errors import UsageError
from nagara.store.errors import AbsentError, UnavailableError
from nagara.store.retrying import RefusedError, RetryPolicy
from nagara.store.statistics import TierStatistics
from nagara.store.tier import Entry, check_key

T = TypeVar("T")


class S3Tier:
    """One tenant's part of a bucket.

    Args:
        bucket: `s3://BUCKET/PREFIX`; the tenant is put behind it.
        options: endpoint, region, access_key_id, secret_access_key, ... as obstore names them;
            what is missing comes from the environment.
    """

    can_write = True

    def __init__(
        self,
        bucket: str,
        tenant: str,
        *,
        options: Mapping[str, Any] | None = None,
        name: str = "s3",
        retries: RetryPolicy | None = None,
    ) -> None:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise UsageError(
                "an s3 tier needs the library obstore", hint="pip install 'nagara[s3]'"
            ) from None
        address = f"{bucket.rstrip('/')}/{tenant}"
        chosen = dict(options or {})
        plain = str(chosen.get("endpoint", "")).startswith("http:")
        self._store = S3Store.from_url(
            address,
            client_options={"allow_http": plain, "connect_timeout": "5s", "timeout": "60s"},
            retry_config={"max_retries": 1},
            **chosen,
        )
        self.name = name
        self.statistics = TierStatistics(name)
        self._retries = retries or RetryPolicy()

    def read(self, key: str, start: int, length: int, deadline_s: float) -> bytes:
        import obstore

        check_key(key)

        def ask() -> bytes:
            data = bytes(obstore.get_range(self._store, key, start=start, length=length))
            if len(data) != length:
                raise UnavailableError(f"answered with {len(data)} bytes", where=self.name)
            return data

        return self._timed(ask, key, deadline_s) if length else b""

    def read_into(self, key: str, start: int, buffer: memoryview, deadline_s: float) -> None:
        buffer[:] = self.read(key, start, len(buffer), deadline_s)

    def read_all(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        import obstore

        check_key(key)

        def ask() -> bytes:
            found = obstore.get(self._store, key)
            if found.meta["size"] > limit_bytes:
                raise UnavailableError(f"{key} is over {limit_bytes} bytes", where=self.name)
            return bytes(found.bytes())

        return self._timed(ask, key, deadline_s)

    def has(self, key: str, deadline_s: float) -> bool:
        import obstore

        check_key(key)
        try:
            self._ask(lambda: obstore.head(self._store, key), key, deadline_s)
        except AbsentError:
            return False
        return True

    def write(self, key: str, source: bytes | Path, deadline_s: float) -> None:
        import obstore

        check_key(key)
        self._ask(lambda: obstore.put(self._store, key, source), key, deadline_s)
        self.statistics.wrote(len(source) if isinstance(source, bytes) else source.stat().st_size)

    def entries(self, prefix: str, deadline_s: float) -> Iterator[Entry]:
        import obstore

        for page in obstore.list(self._store, prefix=prefix):
            for item in page:
                yield Entry(item["path"], item["size"], item["last_modified"].timestamp())

    def delete(self, key: str, deadline_s: float) -> None:
        import obstore

        check_key(key)
        self._ask(lambda: obstore.delete(self._store, key), key, deadline_s)

    def close(self) -> None:
        """The library closes its connections itself."""

    def _timed(self, ask: Callable[[], bytes], key: str, deadline_s: float) -> bytes:
        begun_s = time.monotonic()
        try:
            data = self._ask(ask, key, deadline_s)
        except AbsentError:
            self.statistics.miss(time.monotonic() - begun_s)
            raise
        self.statistics.hit(len(data), time.monotonic() - begun_s)
        return data

    def _ask(self, ask: Callable[[], T], key: str, deadline_s: float) -> T:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        def translated() -> T:
            try:
                return ask()
            except FileNotFoundError:
                raise AbsentError(f"{key} is not there", where=self.name) from None
            except UnavailableError:
                self.statistics.fault()
                raise
            except (PermissionDeniedError, UnauthenticatedError) as error:
                self.statistics.fault()
                raise RefusedError(
                    "refused", where=f"{self.name} {key}", hint="check its keys and its clock"
                ) from error
            except (BaseError, OSError) as error:
                self.statistics.fault()
                said = str(error).strip().splitlines()[0][:200]
                raise UnavailableError(said, where=f"{self.name} {key}") from error

        return self._retries.run(translated, deadline_s)
