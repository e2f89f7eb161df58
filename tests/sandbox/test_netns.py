"""Network namespaces: sockets opened inside, the caller staying where it is."""

import os
import resource
import socket
from pathlib import Path

import pytest

from nagara.sandbox.netns import NetworkNamespace


def home() -> str:
    return str(Path("/proc/thread-self/ns/net").readlink())


@pytest.fixture
def namespace():
    before = home()
    namespace = NetworkNamespace.create()
    yield namespace
    namespace.close()
    assert home() == before


@pytest.mark.root
def test_a_socket_opened_inside_reaches_only_what_listens_inside(namespace):
    with namespace.open_socket() as server, namespace.open_socket() as client:
        server.bind(("127.0.0.1", 8000))
        server.listen()
        with socket.socket() as outside, pytest.raises(ConnectionRefusedError):
            outside.connect(("127.0.0.1", 8000))
        client.setblocking(True)
        client.connect(("127.0.0.1", 8000))
        server.setblocking(True)
        connection, _ = server.accept()
        with connection:
            client.sendall(b"through")
            assert connection.recv(100) == b"through"


@pytest.mark.root
def test_two_namespaces_may_use_the_same_port(namespace):
    other = NetworkNamespace.create()
    try:
        with namespace.open_socket() as one, other.open_socket() as two:
            one.bind(("127.0.0.1", 8000))
            two.bind(("127.0.0.1", 8000))
    finally:
        other.close()


@pytest.mark.root
def test_the_caller_stays_in_its_own_namespace(namespace):
    before = home()
    assert str(namespace.path.readlink()) != before
    with namespace.open_socket():
        assert home() == before


@pytest.mark.root
def test_the_way_back_is_taken_also_when_no_socket_can_be_made(namespace):
    before = home()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    spare = os.open("/dev/null", os.O_RDONLY)
    # Room for the descriptor of the way home and no other.
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))
    os.close(spare)
    try:
        with pytest.raises(OSError, match="Too many open files"):
            namespace.open_socket()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert home() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == in_use


@pytest.mark.root
def test_the_namespace_of_a_running_process_can_be_entered():
    of_self = NetworkNamespace.of_process(os.getpid())
    try:
        assert str(of_self.path.readlink()) == home()
    finally:
        of_self.close()


@pytest.mark.root
def test_an_ordinary_user_may_not_enter_one(namespace):
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            namespace.open_socket()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_an_ordinary_user_may_not_make_one():
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            NetworkNamespace.create()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
