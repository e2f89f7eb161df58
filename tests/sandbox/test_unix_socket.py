"""Unix sockets with known peers, at paths of any length."""

import os

import pytest

from nagara.sandbox.unix_socket import connect, listen, peer_uid


def test_a_path_longer_than_an_address_works(tmp_path):
    folder = tmp_path / ("deep" * 20) / ("er" * 60)
    folder.mkdir(parents=True)
    path = folder / "socket"
    assert len(str(path)) > 108
    with listen(path) as server, connect(path) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_the_file_is_for_its_owner_alone(tmp_path):
    with listen(tmp_path / "socket"):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_the_file_can_be_given_to_another_user(tmp_path):
    with listen(tmp_path / "socket", owner=65534):
        assert (tmp_path / "socket").stat().st_uid == 65534


def test_a_dead_socket_is_replaced(tmp_path):
    listen(tmp_path / "socket").close()
    with pytest.raises(ConnectionRefusedError):
        connect(tmp_path / "socket")
    with listen(tmp_path / "socket"), connect(tmp_path / "socket"):
        pass


def test_a_missing_socket_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "socket")


def test_the_peer_is_known(tmp_path):
    with listen(tmp_path / "socket") as server, connect(tmp_path / "socket"):
        accepted, _ = server.accept()
        with accepted:
            assert peer_uid(accepted) == os.getuid()
