"""The conformance suite on every kind of tier, and what coded ones promise beyond it."""

import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nagara.base.errors import UsageError
from nagara.store.cache_server import CacheServer
from nagara.store.coded_tier import CodedTier, read_tenant_key
from nagara.store.coding import FRAME_BYTES, TABLE, Coding
from nagara.store.configured import open_tier
from nagara.store.errors import CorruptError, UnavailableError
from nagara.store.http_tier import HttpTier
from nagara.store.local import ObjectFolder
from nagara.store.moving import push
from nagara.store.names import name_bytes
from nagara.store.retrying import RefusedError, RetryPolicy
from nagara.store.roots import Root, put_list, write_root
from nagara.store.s3_tier import S3Tier
from nagara.store.store import Store
from nagara.store.tier import FolderTier, Tier
from nagara.store.tokens import Tokens
from nagara.testing.objects import chunk_list, noise
from nagara.testing.tier_conformance import MIDDLE, SMALL, TierConformance, TierMaker, put, soon
from nagara.testing.tiers import ScriptedTier

StoreMaker = Callable[..., Store]
KEY = bytes(range(32))
LARGE = noise((64 << 20) + 7)
CODINGS = {
    "compressed": {"level": 3},
    "encrypted": {"key": KEY},
    "compressed and encrypted": {"level": 3, "key": KEY},
}


class TestScriptedTier(TierConformance):
    @pytest.fixture
    def make_tier(self) -> TierMaker:
        tiers: dict[str, ScriptedTier] = {}
        return lambda tenant: tiers.setdefault(tenant, ScriptedTier())


class TestFolderTier(TierConformance):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> TierMaker:
        (tmp_path / "far").mkdir()
        return lambda tenant: FolderTier(tmp_path / "far", tenant)

    def test_a_folder_that_is_not_mounted_is_not_an_empty_one(self, tmp_path: Path) -> None:
        tier, key = FolderTier(tmp_path / "far", "a"), name_bytes(SMALL).key
        for call in (
            lambda: tier.has(key, soon()),
            lambda: tier.read(key, 0, 1, soon()),
            lambda: tier.read_all(key, 100, soon()),
            lambda: list(tier.entries("sha256", soon())),
        ):
            with pytest.raises(UnavailableError, match="is not there"):
                call()


class TestCacheServer(TierConformance):
    can_list = can_delete = False

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Iterator[TierMaker]:
        folder = ObjectFolder(tmp_path / "cache")
        stores = lambda tenant: Store(folder.tenant(tenant), time_limit_s=10)  # noqa: E731
        server = CacheServer(folder, stores, Tokens(None), ("127.0.0.1", 0))
        thread = threading.Thread(target=server.run)
        thread.start()
        made: list[HttpTier] = []

        def make(tenant: str) -> HttpTier:
            made.append(HttpTier(f"http://127.0.0.1:{server.port}", tenant))
            return made[-1]

        yield make
        for tier in made:
            tier.close()
        server.close()
        thread.join()
        folder.close()


def bucket_tier(bucket: dict[str, str], folder: Path, tenant: str = "a", **options: str) -> S3Tier:
    """A tenant's part of a prefix that belongs to one test."""
    prefix = f"s3://objects/{folder.name}"
    retries = RetryPolicy(2, sleep=lambda _: None)
    return S3Tier(prefix, tenant, options={**bucket, **options}, retries=retries)


class TestBucket(TierConformance):
    @pytest.fixture
    def make_tier(self, bucket: dict[str, str], tmp_path: Path) -> TierMaker:
        return lambda tenant: bucket_tier(bucket, tmp_path, tenant)

    def test_objects_small_and_large_come_from_a_bucket(
        self, bucket: dict[str, str], tmp_path: Path, make_store: StoreMaker
    ) -> None:
        carry_over(lambda: bucket_tier(bucket, tmp_path), make_store)
        raw = bucket_tier(bucket, tmp_path).read_all(name_bytes(LARGE).list_key, 1 << 20, soon())
        assert raw == chunk_list(LARGE).to_bytes()

    def test_objects_come_from_a_bucket_that_cannot_read_them(
        self, bucket: dict[str, str], tmp_path: Path, make_store: StoreMaker
    ) -> None:
        coding = Coding(level=1, key=KEY)
        carry_over(lambda: CodedTier(bucket_tier(bucket, tmp_path), coding, tmp_path), make_store)
        raw = bucket_tier(bucket, tmp_path).read_all(name_bytes(SMALL).key, 1 << 20, soon())
        assert SMALL not in raw

    def test_a_wrong_key_is_refused_at_once(self, bucket: dict[str, str], tmp_path: Path) -> None:
        name = put(bucket_tier(bucket, tmp_path), SMALL)
        stranger = bucket_tier(bucket, tmp_path, secret_access_key="another")
        with pytest.raises(RefusedError, match="check its keys"):
            stranger.read(name.key, 0, 1, soon())
        assert stranger.statistics.report().faults == 1

    def test_an_endpoint_that_is_down_is_unavailable_not_absent(
        self, bucket: dict[str, str], tmp_path: Path
    ) -> None:
        tier = bucket_tier(bucket, tmp_path, endpoint="http://127.0.0.1:9")
        with pytest.raises(UnavailableError):
            tier.read(name_bytes(SMALL).key, 0, 1, soon())


def carry_over(make_tier: Callable[[], Tier], make_store: StoreMaker) -> None:
    """Objects of one machine appear on another one by way of a tier."""
    here = make_store(folder="here")
    contents = [SMALL, LARGE]
    names = [here.put_bytes(content) for content in contents]
    root = Root("images", "x", (put_list(here, names),), {})
    write_root(here.local, root)
    push(here, make_tier(), root)
    there = make_store(make_tier(), folder="there")
    for name, content in zip(names, contents, strict=True):
        there.ensure(name)
        assert there.local.path(name).read_bytes() == content


@pytest.mark.parametrize("coding", CODINGS)
class TestCodedTier(TierConformance):
    @pytest.fixture
    def make_tier(self, coding: str, tmp_path: Path) -> TierMaker:
        (tmp_path / "far").mkdir()

        def make(tenant: str) -> CodedTier:
            tier = FolderTier(tmp_path / "far", tenant)
            return CodedTier(tier, Coding(**CODINGS[coding]), tmp_path)  # type: ignore[arg-type]

        return make

    def test_nothing_is_left_where_content_is_coded(
        self, make_tier: TierMaker, tmp_path: Path
    ) -> None:
        put(make_tier("a"), MIDDLE)
        assert [path.name for path in tmp_path.iterdir()] == ["far"]

    def test_a_flipped_bit_anywhere_is_found(self, make_tier: TierMaker, tmp_path: Path) -> None:
        tier = make_tier("a")
        name = put(tier, MIDDLE)
        path = tmp_path / "far/a" / name.key
        path.chmod(0o644)
        stored = path.read_bytes()
        for at in (0, 3, 40, len(stored) // 2, len(stored) - 1):
            damaged = bytearray(stored)
            damaged[at] ^= 4
            path.write_bytes(damaged)
            try:
                content = make_tier("a").read(name.key, 0, name.size, soon())
            except (CorruptError, UnavailableError):
                continue
            # Without a key only the object's own hash tells, as in any tier.
            assert name_bytes(content) != name


def test_what_repeats_takes_little_room_and_a_part_of_it_little_time(tmp_path: Path) -> None:
    content = b"once and again " * 1_000_000
    far = FolderTier(tmp_path / "far", "a")
    tier = CodedTier(far, Coding(level=3), tmp_path)
    name = put(tier, content)
    assert (tmp_path / "far/a" / name.key).stat().st_size < len(content) / 50
    before = far.statistics.report().read_bytes
    assert tier.read(name.key, 5 << 20, 100, soon()) == content[5 << 20 : (5 << 20) + 100]
    assert far.statistics.report().read_bytes - before < FRAME_BYTES / 10


def test_what_does_not_get_smaller_is_stored_as_it_is() -> None:
    coding = Coding(level=3)
    assert len(coding.encode("sha256/x", 0, 1, noise(1000))) == coding.most_bytes(1000) == 1001


@pytest.mark.parametrize(
    ("key", "index", "count"), [("sha256/b", 1, 3), ("sha256/a", 2, 3), ("sha256/a", 1, 4),
                                ("sha256/a", TABLE, 3)]
)  # fmt: skip
def test_a_sealed_frame_opens_in_its_own_place_only(key: str, index: int, count: int) -> None:
    coding = Coding(key=KEY)
    sealed = coding.encode("sha256/a", 1, 3, SMALL)
    size = len(SMALL)
    assert coding.decode("sha256/a", 1, 3, sealed, size, exact=True) == SMALL
    for opener in (coding, Coding(key=KEY, level=1)):
        with pytest.raises(CorruptError, match="does not open"):
            opener.decode(key, index, count, sealed, size, exact=True)
    with pytest.raises(CorruptError, match="does not open"):
        Coding(key=bytes(32)).decode("sha256/a", 1, 3, sealed, size, exact=True)


def test_equal_content_is_sealed_differently_each_time() -> None:
    coding = Coding(key=KEY)
    assert len({coding.encode("sha256/a", 0, 1, SMALL) for _ in range(100)}) == 100


def test_a_frame_that_unpacks_to_more_than_its_place_is_refused() -> None:
    coding = Coding(level=19)
    bomb = coding.encode("sha256/a", 0, 1, bytes(1 << 26))
    assert len(bomb) < 10_000
    with pytest.raises(CorruptError, match="larger than its place"):
        coding.decode("sha256/a", 0, 1, bomb, FRAME_BYTES, exact=False)


def test_tenants_keys_are_read_from_private_files(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    with pytest.raises(UsageError, match="cannot be read"):
        read_tenant_key(tmp_path, "a")
    path.write_bytes(base64.b64encode(KEY) + b"\n")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        read_tenant_key(tmp_path, "a")
    path.chmod(0o600)
    assert read_tenant_key(tmp_path, "a") == KEY
    for wrong in (b"", b"???", base64.b64encode(b"short")):
        path.write_bytes(wrong)
        with pytest.raises(UsageError):
            read_tenant_key(tmp_path, "a")


def test_a_tier_is_coded_as_its_settings_say(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_bytes(base64.b64encode(KEY))
    (tmp_path / "a.key").chmod(0o600)
    settings = {"kind": "folder", "path": str(tmp_path / "far")}
    coded = {**settings, "compress": True, "key_folder": str(tmp_path)}
    name = put(open_tier(coded, "a", tmp_path), SMALL)
    assert SMALL not in (tmp_path / "far/a" / name.key).read_bytes()
    assert open_tier(coded, "a", tmp_path).read(name.key, 0, name.size, soon()) == SMALL
    with pytest.raises(UsageError, match=r"b\.key"):
        open_tier(coded, "b", tmp_path)
    with pytest.raises(UsageError, match="a level from 1 to 22"):
        open_tier({**settings, "compress": 99}, "a", tmp_path)
