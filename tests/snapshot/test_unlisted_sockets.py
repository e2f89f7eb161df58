import os
import socket
from pathlib import Path

import pytest

from nagara.sandbox.netns import NetworkNamespace
from nagara.snapshot.unlisted_sockets import own_unlisted


def inode(of: socket.socket) -> int:
    return os.fstat(of.fileno()).st_ino


def listed() -> set[int]:
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {int(line.split()[9]) for line in lines}


def test_a_new_socket_and_one_whose_connection_was_reset_are_listed_nowhere_but_ordinary() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as new:
        client = socket.create_connection(server.getsockname())
        taken, _ = server.accept()
        with taken:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            with pytest.raises(ConnectionResetError):
                taken.recv(1)
            assert not {inode(new), inode(taken)} & listed()
            wanted = {inode(new), inode(taken)}
            assert set(own_unlisted([os.getpid()], wanted)) == wanted


def test_a_socket_that_is_gone_is_held_against_nobody() -> None:
    with socket.socket() as gone:
        number = inode(gone)
    assert list(own_unlisted([os.getpid()], {number})) == [number]


def test_a_socket_of_a_kind_that_cannot_be_saved_is_not_ordinary() -> None:
    try:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)  # IPPROTO_MPTCP
    except OSError:
        pytest.skip("needs a kernel with MPTCP")
    with made:
        assert list(own_unlisted([os.getpid()], {inode(made)})) == []


@pytest.mark.root
def test_a_socket_of_another_network_namespace_is_not_ordinary() -> None:
    namespace = NetworkNamespace.create()
    try:
        with namespace.open_socket() as foreign:
            assert list(own_unlisted([os.getpid()], {inode(foreign)})) == []
    finally:
        namespace.close()
