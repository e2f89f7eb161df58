from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nagara.store.local import ObjectFolder
from nagara.store.store import Store
from nagara.store.tier import Tier
from nagara.testing.origin import Origin, running_origin

StoreMaker = Callable[..., Store]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[StoreMaker]:
    """Stores over folders below the test's own; closed afterwards."""
    closing: list[Store | ObjectFolder] = []

    def make(
        *tiers: Tier,
        folder: str = "store",
        limit: int | None = None,
        tenant: str = "default",
        time_limit_s: float = 20.0,
    ) -> Store:
        objects = ObjectFolder(tmp_path / folder, limit)
        store = Store(objects.tenant(tenant), tiers, time_limit_s=time_limit_s)
        closing.extend((objects, store))
        return store

    yield make
    for thing in reversed(closing):
        thing.close()


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    root = tmp_path / "origin"
    root.mkdir()
    with running_origin(root) as running:
        yield running
