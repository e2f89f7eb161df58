"""The zone caches that this machine was told of, beside the tiers its owner has set.

    STATE/store/zone.json, mode 0600, written by the machine's agent:
    {"caches": ["http://10.0.0.1:7070"], "token": "...", "certificates": "/etc/nagara/cluster"}

Whoever has the store open (the agent, the file daemons, a command) notices a change at its next
question: there is nobody who would have to tell them. Blocking, some microseconds; any thread.
"""

import hashlib
import hmac
import json
import logging
import os
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nagara.base.durable import write_durably
from nagara.base.errors import UsageError
from nagara.store.certificates import read_certificates
from nagara.store.http_tier import HttpTier
from nagara.store.tier import Tier

FILE_NAME = "zone.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Zone:
    """What a machine was told.

    `certificates`: a folder with ca.pem, cert.pem and key.pem, shown to caches and asked of them.
    """

    caches: tuple[str, ...] = ()  # addresses, nearest first
    token: str | None = None
    certificates: str | None = None


NO_ZONE = Zone()


def read_zone(folder: Path) -> Zone:
    """What the store in `folder` was told; nothing where its file is absent or damaged."""
    path = folder / FILE_NAME
    try:
        content: Mapping[str, Any] = json.loads(path.read_bytes())
        return Zone(tuple(map(str, content["caches"])), content["token"], content["certificates"])
    except FileNotFoundError:
        return NO_ZONE
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s is not used: %r", path, error)
        return NO_ZONE


def write_zone(folder: Path, zone: Zone) -> bool:
    """Keeps what was told; False if that was known. Raises OSError."""
    zone = zone if zone.caches else NO_ZONE  # what is shown to nobody need not be on the disk
    if read_zone(folder) == zone:
        return False
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / FILE_NAME, json.dumps(asdict(zone)).encode(), mode=0o600)
    return True


def member_token(secret: bytes) -> str:
    """What a machine of a cluster shows at caches: follows from the cluster's secret, which it
    does not tell."""
    return hmac.digest(secret, b"nagara objects", hashlib.sha256).hex()


class ZoneTiers:
    """One tenant's part of the caches that the store in `folder` was told of."""

    def __init__(self, folder: Path, tenant: str) -> None:
        self._folder = folder
        self._tenant = tenant
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._zone = NO_ZONE
        self._tiers: dict[str, HttpTier] = {}

    def now(self) -> Sequence[Tier]:
        """The tiers, nearest first."""
        try:
            state = os.stat(self._folder / FILE_NAME)  # noqa: PTH116 - before each fetch
        except OSError:
            seen = None
        else:
            seen = (state.st_mtime_ns, state.st_ino)
        with self._lock:
            if seen != self._seen:
                self._seen = seen
                self._take(read_zone(self._folder))
            return tuple(self._tiers.values())

    def _take(self, zone: Zone) -> None:
        before, self._tiers = self._tiers, {}
        is_same = (zone.token, zone.certificates) == (self._zone.token, self._zone.certificates)
        for url in zone.caches:
            known = before.pop(url, None) if is_same else None
            try:
                self._tiers[url] = known or self._opened(url, zone)
            except UsageError as error:
                _log.warning("a zone cache is not used: %s", error)
        for gone in before.values():
            gone.close()
        self._zone = zone

    def _opened(self, url: str, zone: Zone) -> HttpTier:
        folder = zone.certificates
        tls = None if folder is None else read_certificates(Path(folder)).as_caller
        name = f"zone@{urllib.parse.urlsplit(url).netloc}"
        return HttpTier(url, self._tenant, name=name, token=zone.token, can_write=True, tls=tls)

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            for tier in self._tiers.values():
                tier.close()
            self._tiers.clear()
            self._seen = None
