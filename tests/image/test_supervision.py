"""The file daemon dies or hangs, or several want one at once: there is one, and readers go on."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nagara.image import lazy_layer
from nagara.image.lazy_layer import DaemonError, LazyLayer
from nagara.image.mounts import mount_points
from nagara.testing.objects import noise

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]


def ping(layer: LazyLayer) -> Any:
    """The daemon's process number, or None while there is none."""
    try:
        return layer.ask({"op": "ping"})["pid"]
    except DaemonError:
        return None


def daemons_of(machine: Any) -> list[int]:
    """Living file daemons of a machine's folder; one that was just ended has a moment to go."""
    found: list[int] = []
    for _ in range(500):
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if os.fsencode(machine.folder / "store") in words:
                    found.append(int(entry.name))
        if len(found) <= 1:
            break
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_daemon_that_hangs_is_replaced_and_does_not_stay_beside_its_successor(
    make_machine: MachineMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_supervised: bool,
) -> None:
    source, target = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    target.mkdir()
    (source / "file").write_bytes(noise(300_000))
    machine = make_machine()
    image = machine.add(source).image
    mounted = machine.mounts.mount("default", image, str(target), prefer_lazy=True)
    machine.mounts.mount_at(mounted, target)
    first = machine.daemon_pid()
    monkeypatch.setattr(lazy_layer, "DEAF_S", 1.0)
    layer = machine.mounts.lazy_layer("default")
    if is_supervised:
        layer.supervise()
    os.kill(first, signal.SIGSTOP)
    reader = subprocess.Popen(["cat", str(target / "file")], stdout=subprocess.PIPE)
    if not is_supervised:
        layer.ensure()
    assert reader.communicate(timeout=60)[0] == noise(300_000)
    assert machine.daemon_pid() != first
    assert daemons_of(machine) == [machine.daemon_pid()]


def test_many_mounters_at_once_start_one_daemon(make_machine: MachineMaker) -> None:
    machines = [make_machine() for _ in range(6)]  # of one folder, as several processes have them
    layers = [machine.mounts.lazy_layer("default") for machine in machines]
    with ThreadPoolExecutor(len(layers)) as pool:
        for _ in pool.map(lambda layer: layer.ensure(), layers):
            pass
    assert len({machine.daemon_pid() for machine in machines}) == 1
    assert daemons_of(machines[0]) == [machines[0].daemon_pid()]
    assert len(mount_points(layers[0].path)) == 1


def test_a_layer_that_was_taken_down_is_looked_after_again(make_machine: MachineMaker) -> None:
    layer = make_machine().mounts.lazy_layer("default")
    for _ in range(2):
        layer.ensure()
        layer.supervise()
        first = ping(layer)
        os.kill(first, signal.SIGKILL)
        while ping(layer) in (None, first):
            time.sleep(0.02)
        layer.unmount()


def test_a_layer_with_a_daemon_that_hangs_is_taken_down(
    make_machine: MachineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_machine()
    layer = machine.mounts.lazy_layer("default")
    layer.ensure()
    monkeypatch.setattr(lazy_layer, "DEAF_S", 0.5)
    os.kill(machine.daemon_pid(), signal.SIGSTOP)
    layer.unmount()
    assert daemons_of(machine) == []
    assert mount_points(layer.path) == []
