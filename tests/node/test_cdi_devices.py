"""Real containers with a made-up device: the kernel's log under another name.

runc shows a container the usual devices of itself, and this is none of them; to open it for
writing needs no right, so that whether it opens is the control group's decision alone.
"""

import dataclasses
import json
import os

import pytest

from nagara.contract.node import NodeError
from nagara.contract.replica import StartKind
from nagara.sandbox import cdi

pytestmark = pytest.mark.root
OPEN = """
try:
    os.close(os.open("/dev/made-up", os.{flag}))
    answer = "opened"
except OSError as error:
    answer = error.strerror
"""


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Makes the machine know the device, with permissions."""
    monkeypatch.setattr(cdi, "FOLDERS", (tmp_path,))

    def make(permissions):
        shown = tmp_path / "shown"
        shown.write_text("a driver's library")
        log = os.stat("/dev/kmsg").st_rdev  # noqa: PTH116
        numbers = {"type": "c", "major": os.major(log), "minor": os.minor(log)}
        node = {"path": "/dev/made-up", **numbers, "permissions": permissions, "fileMode": 0o666}
        edits = {
            "deviceNodes": [node],
            "mounts": [{"hostPath": str(shown), "containerPath": "/opt/made-up/library"}],
            "env": ["MADE_UP=0"],
        }
        device = {"name": "0", "containerEdits": edits}
        spec = {"cdiVersion": "0.6.0", "kind": "made.up/log", "devices": [device]}
        (tmp_path / "made-up.json").write_text(json.dumps(spec))

    return make


@pytest.fixture
def spec(yard):
    return dataclasses.replace(yard.spec(), devices=("made.up/log=0",))


async def test_a_container_sees_its_device_and_what_belongs_to_it(yard, known, spec):
    known("w")
    started = await yard.start(spec)
    tell = yard.tell
    assert await tell(started.replica, OPEN.format(flag="O_WRONLY")) == "opened"
    look = "answer = [open('/opt/made-up/library').read(), os.environ['MADE_UP']]"
    assert await tell(started.replica, look) == ["a driver's library", "0"]


async def test_the_control_group_decides_what_may_be_done_with_it(yard, known, spec):
    known("m")
    started = await yard.start(spec)
    refused = await yard.tell(started.replica, OPEN.format(flag="O_WRONLY"))
    assert refused == os.strerror(1)


async def test_a_container_without_it_does_not_see_it(yard, known):
    known("rw")
    started = await yard.start()
    missing = await yard.tell(started.replica, OPEN.format(flag="O_WRONLY"))
    assert missing == os.strerror(2)


async def test_a_restored_container_has_it_too(yard, known, spec):
    known("w")
    assert (await yard.capture(spec)).reason is None
    started = await yard.start(spec)
    assert started.kind is StartKind.RESTORED, started.fallback
    assert await yard.tell(started.replica, OPEN.format(flag="O_WRONLY")) == "opened"


async def test_a_device_that_is_not_there_fails_the_start_with_its_name(yard, known, spec):
    known("rw")
    lacking = dataclasses.replace(spec, devices=("made.up/log=7",))
    with pytest.raises(NodeError, match=r"made.up/log=7"):
        await yard.start(lacking)
    assert yard.leftovers() == []
