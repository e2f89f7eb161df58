"""What every `Tier` must do, as tests.

Inherit from `TierConformance` in a test module and provide a fixture `make_tier`: called with a
tenant's name it gives that tenant's part of one and the same place, empty at first.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nagara.store.errors import AbsentError, BadNameError, StoreError, UnavailableError
from nagara.store.names import ObjectName, name_bytes
from nagara.store.roots import Root
from nagara.store.tier import Tier
from nagara.testing.objects import noise

TierMaker = Callable[[str], Tier]
SMALL = b"some content"
MIDDLE = noise((5 << 20) + 3)


def soon() -> float:
    """A deadline that is far enough away."""
    return time.monotonic() + 30


def put(tier: Tier, content: bytes) -> ObjectName:
    """An object under its name."""
    name = name_bytes(content)
    tier.write(name.key, content, soon())
    return name


class TierConformance:
    """The tests."""

    can_list = True
    can_delete = True

    def test_what_is_not_there_is_absent(self, make_tier: TierMaker) -> None:
        tier, name = make_tier("a"), name_bytes(SMALL)
        assert not tier.has(name.key, soon())
        with pytest.raises(AbsentError):
            tier.read(name.key, 0, name.size, soon())
        with pytest.raises(AbsentError):
            tier.read_all("roots/images/x", 100, soon())

    @pytest.mark.parametrize("content", [SMALL, MIDDLE], ids=["small", "middle"])
    def test_what_was_written_is_read_whole_and_in_parts(
        self, make_tier: TierMaker, content: bytes
    ) -> None:
        tier = make_tier("a")
        name = put(tier, content)
        assert tier.has(name.key, soon())
        end = len(content)
        for start, length in [(0, end), (0, 1), (end - 1, 1), (end // 2, end // 3), (3, 0)]:
            assert tier.read(name.key, start, length, soon()) == content[start : start + length]
            buffer = bytearray(length)
            tier.read_into(name.key, start, memoryview(buffer), soon())
            assert buffer == content[start : start + length]
        assert tier.read_all(name.key, end, soon()) == content

    def test_a_file_is_written_like_bytes(self, make_tier: TierMaker, tmp_path: Path) -> None:
        source = tmp_path / "content"
        source.write_bytes(MIDDLE)
        tier, name = make_tier("a"), name_bytes(MIDDLE)
        tier.write(name.key, source, soon())
        assert tier.read(name.key, 0, name.size, soon()) == MIDDLE

    def test_reading_over_the_end_is_an_error_and_never_fewer_bytes(
        self, make_tier: TierMaker
    ) -> None:
        tier = make_tier("a")
        for content in (SMALL, MIDDLE):
            name = put(tier, content)
            with pytest.raises(StoreError):
                tier.read(name.key, name.size - 1, 2, soon())
            with pytest.raises(StoreError):
                tier.read_into(name.key, name.size - 1, memoryview(bytearray(2)), soon())

    def test_a_document_over_the_limit_is_refused(self, make_tier: TierMaker) -> None:
        tier = make_tier("a")
        name = put(tier, SMALL)
        with pytest.raises(UnavailableError):
            tier.read_all(name.key, len(SMALL) - 1, soon())

    def test_a_document_may_be_replaced(self, make_tier: TierMaker) -> None:
        tier = make_tier("a")
        for note in ("first", "a longer second"):
            root = Root("images", "x", (), {"note": note})
            tier.write(root.key, root.to_bytes(), soon())
            assert tier.read_all(root.key, 1 << 20, soon()) == root.to_bytes()

    def test_writing_the_same_twice_is_no_error(self, make_tier: TierMaker) -> None:
        tier = make_tier("a")
        assert put(tier, SMALL) == put(tier, SMALL)
        assert tier.read(name_bytes(SMALL).key, 0, len(SMALL), soon()) == SMALL

    def test_tenants_do_not_see_each_other(self, make_tier: TierMaker) -> None:
        name = put(make_tier("a"), SMALL)
        other = make_tier("b")
        assert not other.has(name.key, soon())
        with pytest.raises(AbsentError):
            other.read(name.key, 0, name.size, soon())

    @pytest.mark.parametrize(
        "key",
        ["", "other/x", "sha256", "sha256/../x", "sha256/a/../../../x", "/sha256/x", "sha256/.x"],
    )  # fmt: skip
    def test_a_key_that_means_another_place_is_refused(
        self, make_tier: TierMaker, key: str
    ) -> None:
        tier = make_tier("a")
        for call in (
            lambda: tier.read(key, 0, 1, soon()),
            lambda: tier.write(key, b"x", soon()),
            lambda: tier.has(key, soon()),
        ):
            with pytest.raises(BadNameError):
                call()

    def test_everything_below_a_folder_is_listed(self, make_tier: TierMaker) -> None:
        tier = make_tier("a")
        if not self.can_list:
            with pytest.raises(UnavailableError):
                list(tier.entries("sha256", soon()))
            return
        assert list(tier.entries("sha256", soon())) == []
        names = {put(tier, SMALL), put(tier, b"more")}
        root = Root("images", "x", (), {})
        tier.write(root.key, root.to_bytes(), soon())
        found = list(tier.entries("sha256", soon()))
        assert {entry.key for entry in found} == {name.key for name in names}
        assert all(abs(entry.changed_s - time.time()) < 600 for entry in found)
        assert [entry.key for entry in tier.entries("roots", soon())] == [root.key]

    def test_what_was_deleted_is_gone_and_deleting_again_is_no_error(
        self, make_tier: TierMaker
    ) -> None:
        tier = make_tier("a")
        root = Root("images", "x", (), {})
        tier.write(root.key, root.to_bytes(), soon())
        keys = [root.key, put(tier, SMALL).key] if self.can_delete else [root.key]
        for key in keys:
            for _ in range(2):
                tier.delete(key, soon())
            assert not tier.has(key, soon())

    def test_what_went_over_the_link_is_counted(self, make_tier: TierMaker) -> None:
        tier = make_tier("a")
        before = tier.statistics.report()
        name = put(tier, MIDDLE)
        tier.read(name.key, 0, name.size, soon())
        after = tier.statistics.report()
        assert after.hits > before.hits
        assert after.read_bytes - before.read_bytes >= name.size
        assert after.written_bytes - before.written_bytes >= name.size
