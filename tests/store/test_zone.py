"""The zone's caches: noticed by who has the store open, behind a token and certificates."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nagara.store.cache_server import CacheServer
from nagara.store.certificates import read_certificates
from nagara.store.configured import open_folder, open_store
from nagara.store.errors import AbsentError, UnavailableError
from nagara.store.http_tier import HttpTier
from nagara.store.local import ObjectFolder
from nagara.store.retrying import RefusedError, RetryPolicy
from nagara.store.store import Store
from nagara.store.tokens import Tokens
from nagara.store.zone import (
    FILE_NAME,
    Zone,
    member_token,
    read_zone,
    write_zone,
)
from nagara.testing.certificates import new_authority
from nagara.testing.objects import noise

MEMBER = member_token(b"the cluster's secret")
ONCE = RetryPolicy(attempts=1)


class Cache:
    """A machine whose objects are served."""

    def __init__(self, folder: ObjectFolder, server: CacheServer, scheme: str) -> None:
        self.folder = folder
        self.url = f"{scheme}://127.0.0.1:{server.port}"

    def put(self, data: bytes, tenant: str = "default"):
        return Store(self.folder.tenant(tenant)).put_bytes(data)


@contextmanager
def cache(folder: Path, certificates: Path | None = None) -> Iterator[Cache]:
    objects = open_folder(folder)
    tls = None if certificates is None else read_certificates(certificates).as_agent
    server = CacheServer(
        objects,
        lambda tenant: open_store(objects, tenant, with_zone=False),
        Tokens({}, member=MEMBER),
        ("127.0.0.1", 0),
        tls,
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Cache(objects, server, "http" if tls is None else "https")
    finally:
        server.close()
        thread.join()
        objects.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Store]:
    """A store that is told its zone by the file in its folder."""
    objects = open_folder(tmp_path / "machine")
    store = open_store(objects, "default")
    yield store
    store.close()
    objects.close()


def test_a_cache_is_used_from_the_moment_it_is_told_of_and_no_longer_than_that(
    tmp_path: Path, machine: Store
) -> None:
    folder = machine.local.folder.path
    with cache(tmp_path / "one") as one, cache(tmp_path / "two") as two:
        first, second = one.put(noise(5000, 1)), two.put(noise(5000, 2))
        with pytest.raises(AbsentError):
            machine.read(first)
        assert write_zone(folder, Zone((one.url,), MEMBER))
        assert machine.read(first) == noise(5000, 1)
        (tier,) = machine.transfer.tiers
        assert tier.statistics.report().hits == 1
        assert write_zone(folder, Zone((two.url, one.url), MEMBER))
        assert machine.read(second) == noise(5000, 2)
        assert machine.transfer.tiers[1] is tier, "what was known of it is lost"
        assert not write_zone(folder, Zone((two.url, one.url), MEMBER)), "nothing is new"
        assert write_zone(folder, Zone())
        assert machine.transfer.tiers == ()


def test_caches_that_are_told_of_each_other_do_not_ask_each_other_for_ever(
    tmp_path: Path, machine: Store
) -> None:
    with cache(tmp_path / "one") as one, cache(tmp_path / "two") as two:
        write_zone(one.folder.path, Zone((two.url,), MEMBER))
        write_zone(two.folder.path, Zone((one.url,), MEMBER))
        write_zone(machine.local.folder.path, Zone((one.url, two.url), MEMBER))
        here = Store(machine.local.folder.tenant("other")).put_bytes(noise(5000, 3))
        with pytest.raises(AbsentError):
            machine.read(here)


def test_a_cache_refuses_who_does_not_show_the_clusters_token(tmp_path: Path) -> None:
    with cache(tmp_path / "one") as one:
        name = one.put(noise(5000, 1), "anybody")
        for token in (None, "another-token-of-16"):
            tier = HttpTier(one.url, "anybody", token=token, retries=ONCE)
            with pytest.raises(RefusedError, match="401"):
                tier.read(name.key, 0, 10, _soon())
            tier.close()
        member = HttpTier(one.url, "anybody", token=MEMBER)
        assert member.read(name.key, 0, 10, _soon()) == noise(5000, 1)[:10]
        member.close()
    assert member_token(b"another secret") != MEMBER


def test_with_certificates_only_machines_of_the_authority_are_served(
    tmp_path: Path, machine: Store
) -> None:
    ours, foreign = new_authority(), new_authority()
    folder = ours.member(tmp_path / "pki/one")
    with cache(tmp_path / "one", folder) as one:
        assert one.url.startswith("https://")
        name, large = one.put(noise(5000, 1)), one.put(noise(5 << 20, 2))
        strange = foreign.member(tmp_path / "pki/strange")
        # A stranger is refused, and so is a server that a stranger's authority has not signed.
        for context in (read_certificates(strange).as_caller, None):
            tier = HttpTier(one.url, "default", token=MEMBER, tls=context, retries=ONCE)
            with pytest.raises(UnavailableError):
                tier.read(name.key, 0, 10, _soon())
            tier.close()
        mine = ours.member(tmp_path / "pki/mine")
        write_zone(machine.local.folder.path, Zone((one.url,), MEMBER, str(mine)))
        assert machine.read(name) == noise(5000, 1)
        assert machine.read(large) == noise(5 << 20, 2)


def test_a_damaged_file_or_folder_means_no_cache_and_says_so(
    tmp_path: Path, machine: Store, caplog: pytest.LogCaptureFixture
) -> None:
    folder = machine.local.folder.path
    (folder / FILE_NAME).write_text('{"caches": 3}')
    assert read_zone(folder) == Zone()
    assert machine.transfer.tiers == ()
    write_zone(folder, Zone(("https://127.0.0.1:1",), MEMBER, str(tmp_path / "nowhere")))
    assert machine.transfer.tiers == ()
    assert "nowhere" in caplog.text
    assert (folder / FILE_NAME).stat().st_mode & 0o077 == 0


def _soon() -> float:
    return time.monotonic() + 10
