"""Snapshots that lie encrypted: nothing readable is kept, and nothing changed is opened."""

import base64
import errno
import json
import os
import secrets
from pathlib import Path

import pytest
import pytest_asyncio

from nagara.base.errors import UsageError
from nagara.contract.replica import StartKind
from nagara.node.sealing import SETTINGS_NAME, Sealing
from nagara.store.coding import FRAME_BYTES
from nagara.store.errors import CorruptError

from .test_secrets import kept

pytest.importorskip("cryptography", reason="needs the extra `coded`")


def new_key() -> str:
    return base64.b64encode(os.urandom(32)).decode()


def put_key(folder: Path, tenant: str = "default", key: str | None = None) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / f"{tenant}.key"
    file.touch(mode=0o600)
    file.write_text(key or new_key())


@pytest.fixture
def sealing(tmp_path: Path) -> Sealing:
    put_key(tmp_path / "keys")
    settings = tmp_path / SETTINGS_NAME
    settings.write_text(json.dumps({"key_folder": str(tmp_path / "keys")}))
    return Sealing(settings)


@pytest.mark.parametrize(
    "size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES]
)
def test_what_is_sealed_opens_as_it_was(sealing: Sealing, tmp_path: Path, size: int) -> None:
    folder = tmp_path / "staging"
    (folder / "memory").mkdir(parents=True)
    content = secrets.token_bytes(size)
    path = folder / "memory/pages-1.img"
    path.write_bytes(content)
    named = sealing.seal("default", "s1", folder)
    assert sealing.misfit("default", named) is None
    assert path.read_bytes() != content
    assert size < 16 or content[:16] not in path.read_bytes()
    sealing.open_file("default", "s1", "memory/pages-1.img", path, tmp_path / "opened")
    assert (tmp_path / "opened").read_bytes() == content


def flipped(sealed: bytes) -> bytes:
    return sealed[:100] + bytes([sealed[100] ^ 1]) + sealed[101:]


@pytest.mark.parametrize(
    "change",
    [
        flipped,
        lambda sealed: sealed[:-1],
        lambda sealed: sealed[: len(sealed) // 2],
        lambda sealed: sealed + sealed[-50:],
        lambda sealed: b"",
        lambda sealed: sealed[FRAME_BYTES + 29 :] + sealed[: FRAME_BYTES + 29],
    ],
    ids=["flipped", "short", "half", "long", "empty", "exchanged"],
)
def test_what_was_changed_does_not_open(sealing: Sealing, tmp_path: Path, change: object) -> None:
    folder = tmp_path / "staging"
    folder.mkdir()
    (folder / "a").write_bytes(secrets.token_bytes(2 * FRAME_BYTES))
    sealing.seal("default", "s1", folder)
    (folder / "a").write_bytes(change((folder / "a").read_bytes()))  # type: ignore[operator]
    with pytest.raises(CorruptError):
        sealing.open_file("default", "s1", "a", folder / "a", tmp_path / "opened")


def test_a_file_opens_only_at_its_place_in_its_snapshot(sealing: Sealing, tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    folder.mkdir()
    (folder / "a").write_bytes(b"content")
    sealing.seal("default", "s1", folder)
    for name, inside in (("s2", "a"), ("s1", "b")):
        target = tmp_path / f"{name}-{inside}"
        with pytest.raises(CorruptError, match="does not open"):
            sealing.open_file("default", name, inside, folder / "a", target)


def test_a_command_may_give_the_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    put_key(keys, "one")
    put_key(keys, "two")
    settings = tmp_path / SETTINGS_NAME
    script = f'cat "{keys}/$NAGARA_TENANT.key"'
    settings.write_text(json.dumps({"key_command": ["sh", "-c", script]}))
    by_command = Sealing(settings)
    (folder := tmp_path / "staging").mkdir()
    (folder / "a").write_bytes(b"content")
    named = by_command.seal("one", "s1", folder)
    assert by_command.misfit("one", named) is None
    assert by_command.misfit("two", named) == "it is sealed with another key"
    assert "gives no key" in str(by_command.misfit("three", named))


@pytest.mark.parametrize(
    ("settings", "words"),
    [("{", "cannot be read"), ("{}", "must have one of"), ('{"key": "x"}', "must have one of")],
)
def test_settings_that_are_wrong_are_said(tmp_path: Path, settings: str, words: str) -> None:
    (tmp_path / SETTINGS_NAME).write_text(settings)
    with pytest.raises(UsageError, match=words):
        Sealing(tmp_path / SETTINGS_NAME).seal("default", "s1", tmp_path)


def test_without_settings_only_what_is_not_sealed_fits(tmp_path: Path, sealing: Sealing) -> None:
    off = Sealing(tmp_path / "nowhere.json")
    assert (off.is_on, sealing.is_on) == (False, True)
    assert off.misfit("default", None) is None
    assert off.misfit("default", "abc") == "it is sealed, and this machine has no key"
    assert "this machine seals its snapshots" in str(sealing.misfit("default", None))


MARK = "mark-" + secrets.token_hex(16)
FIRST = f"import uuid; kept = '{MARK[:9]}' + '{MARK[9:]}'; open('/srv/file', 'w').write(kept)"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sealed_app(shared, tmp_path_factory):
    """An app whose snapshot was made where snapshots are sealed."""
    keys = tmp_path_factory.mktemp("keys")
    put_key(keys)
    settings = shared.state / "snapshots" / SETTINGS_NAME
    settings.parent.mkdir(mode=0o700, exist_ok=True)
    settings.write_text(json.dumps({"key_folder": str(keys)}))
    spec = shared.spec(app="sealed", env={"HOOKS": "1", "FIRST": FIRST})
    assert (await shared.capture(spec)).reason is None
    yield spec
    settings.unlink()


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="module")
async def test_a_sealed_snapshot_holds_nothing_readable_and_gives_back_all(shared, sealed_app):
    assert kept(shared.state, MARK) == []
    code = "answer = [kept, open('/srv/file').read()]"
    replicas = []
    for _ in range(2):
        report = await shared.start(sealed_app)
        assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
        assert await shared.tell(report.replica, code) == [MARK, MARK]
        replicas.append(report.replica)
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    assert [at for at in mounted if at.endswith("/opened")] == []
    await shared.stop(*replicas)
    assert kept(shared.state, MARK) == []


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_searched_for_is_found_in_one_that_is_not_sealed(
    shared, sealed_app, monkeypatch
):
    monkeypatch.setattr(shared.node._snapshots._images.sealing, "_path", Path("/nowhere"))
    spec = shared.spec(app="open", env={"HOOKS": "1", "FIRST": FIRST})
    assert (await shared.capture(spec)).reason is None
    assert kept(shared.state, MARK)
    monkeypatch.undo()
    report = await shared.start(spec)  # one that was made before snapshots were sealed here
    assert (report.kind, report.capture_wanted) == (StartKind.PLAIN, True)
    assert "it is not sealed" in report.fallback
    await shared.stop(report.replica)


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="module")
async def test_with_another_key_or_none_it_is_a_plain_start_and_the_snapshot_stays_good(
    shared, sealed_app, tmp_path, monkeypatch
):
    sealing = shared.node._snapshots._images.sealing
    put_key(tmp_path / "keys")
    other = tmp_path / SETTINGS_NAME
    other.write_text(json.dumps({"key_folder": str(tmp_path / "keys")}))
    for settings, words in ((other, "another key"), (Path("/nowhere"), "has no key")):
        monkeypatch.setattr(sealing, "_path", settings)
        report = await shared.start(sealed_app)
        assert (report.kind, report.capture_wanted) == (StartKind.PLAIN, True)
        assert words in report.fallback
        await shared.stop(report.replica)
    monkeypatch.undo()
    report = await shared.start(sealed_app)
    assert report.kind is StartKind.RESTORED
    await shared.stop(report.replica)


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("part", ["memory/pages-1.img", "layer.erofs"])
async def test_what_fails_while_it_is_opened_is_a_plain_start_and_leaves_nothing(
    shared, sealed_app, monkeypatch, part
):
    await shared.node._snapshots._layers.unmount_all()  # so that the layer is opened again
    sealing = shared.node._snapshots._images.sealing
    real = sealing.open_file

    def fail(tenant, name, inside, sealed, target):
        real(tenant, name, inside, sealed, target)
        if inside == part:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(sealing, "open_file", fail)
    report = await shared.start(sealed_app)
    assert report.kind is StartKind.PLAIN
    assert "Cannot allocate memory" in report.fallback
    await shared.stop(report.replica)
    assert shared.leftovers() == []
    monkeypatch.undo()
    report = await shared.start(sealed_app)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    await shared.stop(report.replica)


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="module")
async def test_without_its_key_nothing_is_saved(shared, sealed_app, tmp_path, monkeypatch):
    settings = tmp_path / SETTINGS_NAME
    settings.write_text(json.dumps({"key_folder": str(tmp_path)}))
    monkeypatch.setattr(shared.node._snapshots._images.sealing, "_path", settings)
    report = await shared.capture(shared.spec(app="keyless"))
    assert report.snapshot is None
    assert "cannot be sealed" in report.reason
    assert "key cannot be read" in report.reason
    assert shared.leftovers() == []
