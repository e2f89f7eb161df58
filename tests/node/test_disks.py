"""State folders on file systems that are read-only or full."""

import contextlib
import subprocess

import pytest

from nagara.contract.node import NodeError

pytestmark = pytest.mark.root


@pytest.fixture
def mounted(make_yard, tools):
    """Makes a yard on a file system of its own."""
    yards = []

    def mount(*options, size_bytes=0):
        yard = make_yard()
        tools_folder = (yard.state / "tools").readlink()
        source = "none"
        if size_bytes:
            source = yard.state.parent / f"{yard.state.name}.ext4"
            with source.open("wb") as file:
                file.truncate(size_bytes)
            subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(source)], check=True)
        subprocess.run(["mount", *options, str(source), str(yard.state)], check=True)
        yards.append((yard, source))
        with contextlib.suppress(OSError):  # read-only
            (yard.state / "tools").symlink_to(tools_folder)
        return yard

    yield mount
    for yard, source in yards:
        yard.force_away()  # with the mount itself
        if source != "none":
            source.unlink()


async def test_a_state_folder_that_cannot_be_written_is_said_with_what_to_do(mounted):
    yard = mounted("-t", "tmpfs", "-o", "ro")
    with pytest.raises(NodeError, match="Read-only file system") as caught:
        await yard.open()
    assert "--state" in str(caught.value)
    await yard.close()


def fill(path):
    """To the last block, which a large write does not reach."""
    with path.open("ab", buffering=0) as file:
        for size in (65536, 1024):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


async def test_a_full_disk_fails_starts_and_captures_while_replicas_go_on(mounted):
    yard = mounted("-o", "loop", size_bytes=40 << 20)
    await yard.open()
    report = await yard.start()
    capture = await yard.capture(yard.spec(env={"FIRST": "hoard = os.urandom(60 << 20)"}))
    assert capture.snapshot is None
    assert capture.reason
    fill(yard.state / "ballast")
    with pytest.raises(NodeError):
        await yard.start()
    assert (await yard.ask(report.replica)).body == b"ready"
    (yard.state / "ballast").unlink()
    again = await yard.start()
    await yard.stop(report.replica, again.replica)
    await yard.close()
    assert yard.leftovers() == [f"mount {yard.state}"]


async def test_a_full_disk_does_not_trouble_what_is_restored(mounted):
    """It needs some space, and says so; what it cannot do is to end in something half done."""
    yard = mounted("-o", "loop", size_bytes=60 << 20)
    await yard.open()
    assert (await yard.capture()).reason is None
    fill(yard.state / "ballast")
    with pytest.raises(NodeError, match=r"No space left|could not be made"):
        await yard.start()
    (yard.state / "ballast").unlink()
    report = await yard.start()
    assert report.kind == "restored"
    await yard.close()
    assert yard.leftovers() == [f"mount {yard.state}"]
