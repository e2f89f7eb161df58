"""A machine's store as its settings file describes it.

    STATE/store/settings.json, optional:
    {
      "limit": "200GB",                            bound of the local folder; none by default
      "budget": "256MiB",                          bytes in memory of all transfers
      "tiers": [                                   nearest first
        {"kind": "http", "url": "http://cache.zone:7070", "token_file": "/etc/…", "write": true},
        {"kind": "s3", "bucket": "s3://name/prefix", "options": {"endpoint": "…"}},
        {"kind": "folder", "path": "/mnt/shared/objects"}
      ]
    }

Every tier may have "compress" (true, or a level of zstd) and "key_folder" (TENANT.key in it
encrypts what is there; see `coding`); both need the extra `coded`. All who use a tier have to
say the same of it.

An unknown key is an error, never passed over.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagara.base.errors import UsageError
from nagara.base.units import parse_size_bytes
from nagara.store.budget import ByteBudget
from nagara.store.coded_tier import CodedTier, read_tenant_key
from nagara.store.coding import Coding
from nagara.store.http_tier import HttpTier
from nagara.store.local import ObjectFolder
from nagara.store.s3_tier import S3Tier
from nagara.store.store import DEFAULT_BUDGET_BYTES, Store
from nagara.store.tier import FolderTier, Tier
from nagara.store.zone import ZoneTiers

SETTINGS_NAME = "settings.json"
_CODING_KEYS = {"compress", "key_folder"}
_DEFAULT_LEVEL = 3
_KEYS: dict[str, set[str]] = {
    "http": {"url", "token_file", "write", "name"},
    "s3": {"bucket", "options", "name"},
    "folder": {"path", "name"},
}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What the settings file says."""

    limit_bytes: int | None
    budget_bytes: int
    tiers: tuple[Mapping[str, Any], ...]


def read_settings(folder: Path) -> StoreSettings:
    """The settings of the store in `folder`. Raises `UsageError` naming the fault."""
    path = folder / SETTINGS_NAME
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return StoreSettings(None, DEFAULT_BUDGET_BYTES, ())
    except ValueError as error:
        raise UsageError(f"is no JSON: {error}", where=str(path)) from error
    if not isinstance(document, dict) or not isinstance(document.get("tiers", []), list):
        raise UsageError("is no object with a list of tiers", where=str(path))
    _refuse_unknown(document, {"limit", "budget", "tiers"}, str(path))
    tiers = tuple(document.get("tiers", []))
    for number, tier in enumerate(tiers):
        where = f"{path}: tiers[{number}]"
        if not isinstance(tier, dict) or tier.get("kind") not in _KEYS:
            raise UsageError(f"kind must be one of {', '.join(_KEYS)}", where=where)
        _refuse_unknown(tier, _KEYS[tier["kind"]] | _CODING_KEYS | {"kind"}, where)
    limit, budget = document.get("limit"), document.get("budget")
    return StoreSettings(
        limit_bytes=parse_size_bytes(limit) if limit else None,
        budget_bytes=parse_size_bytes(budget) if budget else DEFAULT_BUDGET_BYTES,
        tiers=tiers,
    )


def open_tier(settings: Mapping[str, Any], tenant: str, scratch: Path) -> Tier:
    """One tenant's part of a configured tier. Raises `UsageError`.

    Args:
        scratch: a folder for large content that is coded before it is sent.
    """
    tier = _open_plain(settings, tenant)
    compress, key_folder = settings.get("compress", False), settings.get("key_folder")
    if not compress and key_folder is None:
        return tier
    level = _DEFAULT_LEVEL if compress is True else compress or None
    if level is not None and (type(level) is not int or not 1 <= level <= 22):
        raise UsageError(f"compress must be true or a level from 1 to 22, not {compress!r}")
    key = None if key_folder is None else read_tenant_key(Path(key_folder), tenant)
    return CodedTier(tier, Coding(level=level, key=key), scratch)


def _open_plain(settings: Mapping[str, Any], tenant: str) -> Tier:
    kind = settings["kind"]
    name = settings.get("name", kind)
    try:
        if kind == "http":
            token_file = settings.get("token_file")
            token = Path(token_file).read_text().strip() if token_file else None
            can_write = bool(settings.get("write", False))
            return HttpTier(settings["url"], tenant, name=name, token=token, can_write=can_write)
        if kind == "s3":
            return S3Tier(settings["bucket"], tenant, options=settings.get("options"), name=name)
        return FolderTier(Path(settings["path"]), tenant, name)
    except KeyError as error:
        raise UsageError(f"a tier of kind {kind} needs {error}") from error
    except OSError as error:
        raise UsageError(f"the token cannot be read: {error}") from error


def open_folder(path: Path) -> ObjectFolder:
    """The object folder at `path`, bounded as its settings say."""
    return ObjectFolder(path, read_settings(path).limit_bytes)


def open_store(
    folder: ObjectFolder, tenant: str, budget: ByteBudget | None = None, *, with_zone: bool = True
) -> Store:
    """One tenant's store over the folder, with the tiers of its settings.

    Args:
        with_zone: and with the zone's caches that this machine was told of; not for one of these
            caches itself: two that ask each other would ask for ever.
    """
    settings = read_settings(folder.path)
    tiers = [open_tier(tier, tenant, folder.path) for tier in settings.tiers]
    return Store(
        folder.tenant(tenant),
        tiers,
        budget=budget or ByteBudget(settings.budget_bytes),
        zone=ZoneTiers(folder.path, tenant) if with_zone else None,
    )


def _refuse_unknown(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(found) - known):
        raise UsageError(
            f"unknown: {', '.join(unknown)}", where=where, hint=f"known: {', '.join(sorted(known))}"
        )
