"""What an app does before it is saved and after it is put back, in processes of its own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from nagara.snapshot.errors import SnapshotError
from nagara.snapshot.renewal import HOOK_SOCKET, call_hook


def in_fresh_process(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ASK = """
import json, os, socket
def tell(path, request):
    path = f"{path}.{os.getpid()}.0"
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(json.dumps(request).encode() + b"\\n")
        return json.loads(s.makefile().readline())
"""


def test_outside_nagara_listening_does_nothing():
    code = "from nagara.snapshot import hooks; print(hooks.listen())"
    assert in_fresh_process(code, NAGARA_HOOK_SOCKET="").strip() == "False"


def test_hooks_run_in_the_order_they_were_registered_and_answer(tmp_path):
    path = str(tmp_path / "deep" / "hook.sock")
    code = (
        ASK
        + f"""
from nagara.snapshot import hooks
calls = []
@hooks.before_snapshot
def first(): calls.append("first")
@hooks.before_snapshot
def second(): calls.append("second")
@hooks.after_restore
def third():
    import os
    calls.append(os.environ["COLOUR"] + os.environ["NAGARA_REPLICA"])
hooks.listen()
print(tell({path!r}, {{"do": "before_snapshot"}}))
print(tell({path!r}, {{"do": "after_restore", "replica": "r1", "env": {{"COLOUR": "red"}}}}))
print(calls)
"""
    )
    assert in_fresh_process(code, NAGARA_HOOK_SOCKET=path).splitlines() == [
        "{'ok': True}",
        "{'ok': True}",
        "['first', 'second', 'redr1']",
    ]
    (socket,) = (tmp_path / "deep").iterdir()
    assert socket.stat().st_mode & 0o777 == 0o600


def test_a_hook_that_raises_is_told_and_the_next_request_works(tmp_path):
    path = str(tmp_path / "hook.sock")
    code = (
        ASK
        + f"""
from nagara.snapshot import hooks
@hooks.before_snapshot
def broken(): raise LookupError("no luck")
hooks.listen()
print(tell({path!r}, {{"do": "before_snapshot"}}))
print(tell({path!r}, {{"do": "dance"}}))
print(tell({path!r}, ["no object"]))
print(tell({path!r}, {{"do": "after_restore", "replica": "r"}}))
"""
    )
    first, second, third, last = in_fresh_process(code, NAGARA_HOOK_SOCKET=path).splitlines()
    assert "LookupError: no luck" in first
    assert "dance" in second
    assert "'ok': False" in third
    assert last == "{'ok': True}"


def test_four_copies_of_one_process_differ_after_reseeding_and_only_then():
    code = """
import json, os, random, ssl, sys, uuid
from nagara.snapshot import hooks
ssl.RAND_bytes(16), random.random()  # generators are in use before
def draw():
    return [random.random(), str(uuid.uuid4()), os.urandom(8).hex(), ssl.RAND_bytes(8).hex()]
answers = []
for reseeds in (False, True):
    for _ in range(4):
        reading, writing = os.pipe()
        if os.fork() == 0:
            # fork() itself renews what the C and Python libraries watch; `random` it does not.
            if reseeds:
                hooks.reseed()
            os.write(writing, json.dumps(draw()).encode())
            os._exit(0)
        os.wait()
        answers.append(json.loads(os.read(reading, 65536)))
print(json.dumps(answers))
"""
    answers = json.loads(in_fresh_process(code))
    renewed = answers[4:]
    for kind in range(4):
        assert len({answer[kind] for answer in renewed}) == 4


def test_numpy_and_torch_are_reseeded_where_they_are_loaded_and_not_loaded_otherwise():
    pytest.importorskip("torch", reason="needs torch")
    code = """
import sys
from nagara.snapshot import hooks
hooks.reseed()
assert "torch" not in sys.modules and "numpy" not in sys.modules
import numpy, torch
def draw():
    numpy.random.seed(1), torch.manual_seed(1)
    hooks.reseed()
    return numpy.random.random(), torch.rand(1).item()
one, two = draw(), draw()
print(one[0] != two[0], one[1] != two[1])
"""
    assert in_fresh_process(code).split() == ["True", "True"]


class Replica:
    """This process as if it were a replica's first one: its root has the hooks' socket."""

    def __init__(self, monkeypatch, root):
        self.socket = root / HOOK_SOCKET.relative_to("/").with_name(f"{HOOK_SOCKET.name}.1.0")
        self.socket.parent.mkdir(parents=True)
        monkeypatch.setattr("nagara.snapshot.renewal.Path", self._path)
        self.root = root

    def _path(self, text):
        assert text == "/proc/1234/root"
        return self.root


@pytest.fixture
def replica(monkeypatch, tmp_path):
    return Replica(monkeypatch, tmp_path)


def answering(path, line):
    """A listener that answers one request with `line`."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve():
        with server:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(line)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_an_app_without_hooks_is_no_error(replica):
    assert call_hook(1234, {"do": "before_snapshot"}, timeout_s=5) is False


def test_a_socket_left_by_a_process_that_has_ended_counts_as_none(replica):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(replica.socket))
    assert call_hook(1234, {"do": "before_snapshot"}, timeout_s=5) is False


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"ok": false, "error": "no luck"}\n', "failed: no luck"),
        (b"", "answered b''"),
        (b"nonsense\n", "answered b'nonsense"),
        (b"[]\n", "answered"),
        (b"{}\n", "answered"),
        (b"[" * 60_000, "answered"),
        (b"x" * 70_000, "says more than 65536 bytes"),
    ],
)
def test_a_hook_that_fails_or_talks_nonsense_is_an_error(replica, line, words):
    thread = answering(replica.socket, line)
    with pytest.raises(SnapshotError, match=words):
        call_hook(1234, {"do": "before_snapshot"}, timeout_s=5)
    thread.join()


def test_a_hook_that_dribbles_is_left_after_the_time_limit(replica):
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(replica.socket))
    server.listen()
    is_over = threading.Event()

    def dribble():
        with server:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while not is_over.wait(0.02):
                    connection.sendall(b" ")

    thread = threading.Thread(target=dribble)
    thread.start()
    with pytest.raises(SnapshotError, match="timed out"):
        call_hook(1234, {"do": "after_restore"}, timeout_s=0.3)
    is_over.set()
    thread.join()


@pytest.mark.parametrize("linked", ["socket", "folder"])
def test_no_link_that_an_app_lays_is_followed(replica, tmp_path, linked):
    outside = tmp_path / "outside"
    outside.mkdir()
    machines = outside / replica.socket.name
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(machines))
        server.listen()
        if linked == "socket":
            replica.socket.symlink_to(machines)
        else:
            replica.socket.parent.rmdir()
            replica.socket.parent.symlink_to(outside)
        assert call_hook(1234, {"do": "before_snapshot"}, timeout_s=1) is False
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_app_cannot_make_threads_of_the_nodes_by_the_thousand(replica):
    for number in range(1100):
        replica.socket.with_name(f"hook.sock.{number}").touch()
    with pytest.raises(SnapshotError, match="1100 processes have hooks"):
        call_hook(1234, {"do": "before_snapshot"}, timeout_s=1)


def test_a_hook_that_works_is_true(replica):
    thread = answering(replica.socket, b'{"ok": true}\n')
    assert call_hook(1234, {"do": "after_restore"}, timeout_s=5) is True
    thread.join()


def test_processes_forked_from_a_listening_one_are_asked_and_renewed_too(tmp_path):
    path = str(tmp_path / "run/nagara/hook.sock")
    code = f"""
import json, os, random, time
from nagara.snapshot import hooks
from nagara.snapshot import renewal
random.seed(1)
hooks.listen()
hooks.listen()  # once more does no harm
pipes, children = [], []
for _ in range(3):
    reading, writing = os.pipe()
    asking, telling = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"here")
        os.read(asking, 1)
        os.write(writing, repr(random.random()).encode())
        os._exit(0)
    pipes.append((reading, telling))
    children.append(child)
for reading, _ in pipes:
    os.read(reading, 4)
renewal.Path = lambda text: __import__("pathlib").Path({str(tmp_path)!r})
request = {{"do": "after_restore", "replica": "r"}}
assert renewal.call_hook(os.getpid(), request, timeout_s=20)
drawn = {{random.random()}}
for reading, telling in pipes:
    os.write(telling, b"x")
    drawn.add(float(os.read(reading, 100)))
for child in children:
    os.waitpid(child, 0)
print(len(drawn), len(os.listdir({str(tmp_path / "run/nagara")!r})))
"""
    assert in_fresh_process(code, NAGARA_HOOK_SOCKET=path).split() == ["4", "4"]


def test_the_file_of_the_hooks_works_alone_in_an_environment_without_nagara(tmp_path):
    import shutil

    from nagara.snapshot import hooks

    shutil.copy(hooks.__file__, tmp_path / "my_hooks.py")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport my_hooks; my_hooks.reseed()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code + "; print(my_hooks.listen())"],
        env={},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False", done.stderr


def test_the_decorators_are_found_where_an_app_looks_for_them():
    import nagara.snapshot
    from nagara.snapshot import hooks

    assert nagara.snapshot.before_snapshot is hooks.before_snapshot
    assert nagara.snapshot.after_restore is hooks.after_restore
