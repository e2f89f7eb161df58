"""A machine and the zone caches of its neighbours: being told of them, serving, publishing.

Control tells every machine where the caches are (`use`). A machine that serves its objects has
published them by having them; another one brings what was made on it to the nearest cache: the
images and models that its apps were given, and its snapshots. What the cache has already is not
sent again. Blocking; called from worker threads.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nagara.base.errors import NagaraError, UsageError
from nagara.image.images import Image, image_from, list_images
from nagara.image.prefetch import boot_id
from nagara.image.shelf_tiers import (
    Entries,
    list_here,
    push_shelved,
    tier_entries,
    withdraw,
)
from nagara.node.machine_faults import as_node_error
from nagara.node.replica_images import NodeImages
from nagara.snapshot.catalog import Catalog, Snapshot, as_shelved, far_entry, root_name
from nagara.store.cache_server import CacheServer
from nagara.store.certificates import read_certificates
from nagara.store.configured import open_folder, open_store
from nagara.store.errors import AbsentError
from nagara.store.local import DEFAULT_TENANT
from nagara.store.moving import push
from nagara.store.roots import DOCUMENT_LIMIT_BYTES, parse_root
from nagara.store.store import Store
from nagara.store.tier import Tier
from nagara.store.tokens import Tokens
from nagara.store.zone import Zone, read_zone, write_zone

_log = logging.getLogger(__name__)
_PUBLISHED = ("app.", "model.")  # what `replica_images` calls them


@dataclass(frozen=True, slots=True)
class Member:
    """What the machine shows to caches, and asks of who comes to its own.

    Args:
        token: None: nothing is shown, and a cache serves loopback alone.
        certificates: a folder with ca.pem, cert.pem and key.pem.
        serves_at: HOST:PORT where its objects are served; None: they are not.
    """

    token: str | None = None
    certificates: Path | None = None
    serves_at: tuple[str, int] | None = None

    @property
    def cache(self) -> str | None:
        """The address of its own cache."""
        if self.serves_at is None:
            return None
        host, port = self.serves_at
        scheme = "http" if self.certificates is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


NO_MEMBER = Member()


class NodeZone:
    """One machine's part in its zone.

    Args:
        store: the folder of its store.
        catalog: its snapshots; None where none can be made.
    """

    def __init__(
        self, store: Path, images: NodeImages, catalog: Catalog | None, member: Member
    ) -> None:
        self._store = store
        self._images = images
        self._catalog = catalog
        self._member = member
        self._publishing = threading.Lock()

    @property
    def cache(self) -> str | None:
        """Where others find this machine's objects."""
        return self._member.cache

    def use(self, caches: Sequence[str]) -> None:
        """Takes up what control says. Raises `NodeError` where that cannot be kept."""
        others = tuple(each for each in caches if each != self.cache)
        folder = self._member.certificates
        told = Zone(others, self._member.token, None if folder is None else str(folder))
        try:
            is_new = write_zone(self._store, told)
        except OSError as error:
            raise as_node_error(error) from error
        if is_new:
            _log.info("the zone's caches: %s", ", ".join(others) or "none")

    def publish(self) -> None:
        """Brings to the zone what it lacks of this machine's; what fails is tried again with the
        next call."""
        with self._publishing:
            if read_zone(self._store).caches and os.geteuid() == 0:
                self._expect()
            if not (self._store / "ledger.sqlite").exists():
                return
            for tenant in self._images.opened().objects.tenant_names():
                try:
                    self._publish(tenant)
                except (NagaraError, OSError) as error:
                    _log.warning("not all of %s's is in the zone: %s", tenant, error)

    def _expect(self) -> None:
        """What starts here comes from the zone at first: the way it comes is made ready."""
        try:
            self._images.opened().expect(DEFAULT_TENANT)
        except (NagaraError, OSError) as error:
            _log.warning("the first start has to wait for the file daemon: %s", error)

    def _publish(self, tenant: str) -> None:
        store = self._images.opened().store(tenant)
        if self.cache is not None:
            self._list(tenant)
            return
        tier = store.transfer.zone_tier
        if tier is None:
            return
        for image in list_images(store.local):
            if image.name.startswith(_PUBLISHED) and self._lacks(store, tier, image):
                moved = push(store, tier, image.to_root())
                _log.info(
                    "%s: brought %d objects to %s", image.name, moved.moved_objects, tier.name
                )
        for app, snapshots in self._snapshots(tenant).items():
            self._push(store, tier, app, snapshots)

    def _lacks(self, store: Store, tier: Tier, image: Image) -> bool:
        """Whether the tier has not the image as it is here; one that is here in part stays."""
        if not store.local.folder.ledger.is_complete(
            store.local.tenant, str(image.list), boot_id()
        ):
            return False
        root = image.to_root()
        try:
            raw = tier.read_all(root.key, DOCUMENT_LIMIT_BYTES, store.deadline(None))
        except AbsentError:
            return True
        return image_from(parse_root(root.kind, root.name, raw)).starts < image.starts

    def _push(self, store: Store, tier: Tier, app: str, snapshots: list[Snapshot]) -> None:
        assert self._catalog is not None
        shelf = self._catalog.shelf(store.local.tenant)
        there = tier_entries(shelf, tier, app, store.deadline(None))
        for snapshot in snapshots:
            name, entry = _root_name(snapshot), far_entry(snapshot)
            if there.get(name) == entry or not store.local.folder.ledger.is_complete(
                store.local.tenant, str(snapshot.image.list), boot_id()
            ):
                continue
            moved = push_shelved(shelf, tier, as_shelved(snapshot), app, entry)
            _log.info("%s: brought %d objects to %s", name, moved.moved_objects, tier.name)
            for old in _replaced(there, name, entry):
                withdraw(shelf, tier, old, app)

    def _list(self, tenant: str) -> None:
        """Lets the snapshots here be found by who asks this machine's cache."""
        if self._catalog is None:
            return
        shelf = self._catalog.shelf(tenant)
        listed: dict[str, Entries] = {
            app: {_root_name(snapshot): far_entry(snapshot) for snapshot in snapshots}
            for app, snapshots in self._snapshots(tenant).items()
        }
        list_here(shelf, listed)

    def _snapshots(self, tenant: str) -> dict[str, list[Snapshot]]:
        found: dict[str, list[Snapshot]] = {}
        if self._catalog is not None:
            for each in self._catalog.everything():
                if each.tenant != tenant or each.snapshot is None:
                    continue
                if not self._catalog.is_quarantined(each.snapshot):
                    found.setdefault(each.app, []).append(each.snapshot)
        return found


def _root_name(snapshot: Snapshot) -> str:
    return root_name(snapshot.app, snapshot.record.key, snapshot.name)


def _replaced(there: Entries, name: str, entry: dict[str, object]) -> Iterator[str]:
    """Other ones of the same key and host class as the one that `entry` is of."""
    for old, other in there.items():
        is_like = (other.get("key"), other.get("variant")) == (entry["key"], entry["variant"])
        if is_like and old != name:
            yield old


@contextmanager
def serving_objects(store: Path, member: Member) -> Iterator[Member]:
    """Serves the store in `store` to the zone for as long as the block lasts, if it is to be.

    Gives the member as which the machine then serves: with the port that was free.

    Raises:
        UsageError: without a token others would be served; or it cannot listen there.
    """
    if member.serves_at is None:
        yield member
        return
    host, port = member.serves_at
    if member.token is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise UsageError(
            f"{host} can be reached by others: objects are not served there without a token",
            hint="give the agent the cluster's --token-file",
        )
    folder = member.certificates
    tls = None if folder is None else read_certificates(folder).as_agent
    tokens = Tokens(None) if member.token is None else Tokens({}, member=member.token)
    objects = open_folder(store)
    open_one: Callable[[str], Store] = lambda tenant: open_store(objects, tenant, with_zone=False)  # noqa: E731
    try:
        server = CacheServer(objects, open_one, tokens, (host, port), tls)
    except OSError as error:
        objects.close()
        raise UsageError(
            f"cannot serve objects: {error.strerror}", where=f"{host}:{port}"
        ) from error
    thread = threading.Thread(target=server.run, name="serve objects", daemon=True)
    thread.start()
    try:
        yield replace(member, serves_at=(host, server.port))
    finally:
        server.close()
        thread.join()
        objects.close()
