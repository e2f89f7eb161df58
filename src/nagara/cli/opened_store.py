"""The store and the image mounts of this machine, as the sub-commands open them."""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from nagara.base.errors import UsageError
from nagara.cli.settings import Settings
from nagara.image.mounting import ImageMounts
from nagara.image.shelf import Shelf
from nagara.node.image_mounts import open_image_mounts
from nagara.sandbox.keeper_client import KeeperClient
from nagara.snapshot.catalog import KIND, Catalog
from nagara.store.configured import open_folder, open_store, open_tier, read_settings
from nagara.store.local import DEFAULT_TENANT, ObjectFolder
from nagara.store.store import Store
from nagara.store.tier import Tier

tenant_option = click.option(
    "--tenant", default=DEFAULT_TENANT, show_default=True, help="Whose objects and images."
)


def store_folder(settings: Settings) -> Path:
    """Where the objects of this machine are."""
    return settings.state / "store"


@contextmanager
def opened_folder(settings: Settings) -> Iterator[ObjectFolder]:
    folder = open_folder(store_folder(settings))
    try:
        yield folder
    finally:
        folder.close()


@contextmanager
def opened_store(settings: Settings, tenant: str) -> Iterator[Store]:
    with opened_folder(settings) as folder:
        store = open_store(folder, tenant)
        try:
            yield store
        finally:
            store.close()


@contextmanager
def opened_catalog(settings: Settings) -> Iterator[Catalog]:
    """The snapshots of this machine. Raises `UsageError` where another user's may not be read."""
    folder = store_folder(settings)
    try:
        has_store = (folder / "ledger.sqlite").exists()
    except PermissionError:
        raise UsageError("snapshots are root's alone", where=str(folder), hint="sudo") from None
    with contextlib.ExitStack() as closing:
        objects: list[ObjectFolder] = []
        stores: dict[str, Store] = {}

        def opened() -> ObjectFolder:
            if not objects:
                objects.append(closing.enter_context(opened_folder(settings)))
            return objects[0]

        def shelf(tenant: str) -> Shelf:
            if tenant not in stores:
                stores[tenant] = open_store(opened(), tenant)
                closing.callback(stores[tenant].close)
            return Shelf(stores[tenant], KIND)

        def tenants() -> list[str]:  # a look makes no store
            return opened().tenant_names() if has_store else []

        yield Catalog(settings.state / "snapshots", shelf, tenants)


def find_tier(settings: Settings, tenant: str, name: str) -> Tier:
    """A configured tier by its name. Raises `UsageError` naming the known ones."""
    tiers = read_settings(store_folder(settings)).tiers
    names = [tier.get("name", tier["kind"]) for tier in tiers]
    if name not in names:
        known = ", ".join(names) or "none; they are set in STATE/store/settings.json"
        raise UsageError(f"no tier named {name!r} (known: {known})")
    return open_tier(tiers[names.index(name)], tenant, store_folder(settings))


@contextmanager
def opened_mounts(settings: Settings) -> Iterator[ImageMounts]:
    """The image mounts, with a keeper behind them."""
    keeper = settings.state / "node/keeper.sock"
    keeper.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    asyncio.run(KeeperClient(keeper).ensure())
    mounts = open_image_mounts(settings.state)
    try:
        yield mounts
    finally:
        mounts.close()
        mounts.objects.close()
