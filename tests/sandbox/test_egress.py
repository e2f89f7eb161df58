"""The way out of a network namespace: what it reaches, what it does not, and that it goes again."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_lab import MACHINE, OUTSIDE, NetworkLab

from nagara.sandbox import egress
from nagara.sandbox.egress import GATEWAY, INSIDE, Egress, EgressError, machine_resolvers, tables
from nagara.sandbox.netns import NetworkNamespace

needs_nft = pytest.mark.skipif(egress.find_nft() is None, reason="needs nft (package nftables)")


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    lab = NetworkLab()
    yield lab
    lab.close()


@pytest.fixture
def out(lab) -> Iterator[Egress]:
    out = Egress("test", [OUTSIDE])
    yield out
    lab.here(out.close)
    assert lab.here(tables) == ()


def attached(lab: NetworkLab, out: Egress) -> NetworkNamespace:
    namespace = NetworkNamespace.create()
    lab.here(out.attach, namespace)
    return namespace


def call(namespace: NetworkNamespace, address: str, port: int, timeout_s: float = 20) -> int:
    """How many bytes come back. Raises OSError when nothing does."""
    with namespace.open_socket() as caller:
        caller.setblocking(True)
        caller.settimeout(timeout_s)
        caller.connect((address, port))
        caller.sendall(b"hello")
        size = 0
        while not (piece := caller.recv(1 << 20)).endswith(b"\n"):
            size += len(piece)
        return size + len(piece)


@pytest.mark.root
@needs_nft
def test_clones_with_one_address_reach_the_outside_at_the_same_time(lab, out):
    clones = [attached(lab, out) for _ in range(3)]
    with lab.machine.open_netlink() as near:
        assert len([name for name in near.link_names() if name.startswith("nagara")]) == 3
    for clone in clones:
        with clone.open_socket() as held:
            held.setblocking(True)
            held.settimeout(20)
            held.connect((OUTSIDE, 80))
            assert held.getsockname()[0] == INSIDE
            # Others call while this one's connection is open.
            assert [call(other, OUTSIDE, 80) > 100_000 for other in clones] == [True] * 3
            held.sendall(b"x")
            assert held.recv(10)
    assert {address for address, _ in lab.callers} == {MACHINE}


@pytest.mark.root
@needs_nft
def test_it_reaches_neither_the_machine_nor_other_replicas_nor_the_clouds_credentials(lab, out):
    one, other = attached(lab, out), attached(lab, out)
    with lab.machine.open_socket() as server, other.open_socket() as neighbour:
        server.bind(("0.0.0.0", 8000))
        server.listen()
        neighbour.bind(("0.0.0.0", 8000))
        neighbour.listen()
        (_, theirs) = sorted(lab.here(_addresses))
        for address in (MACHINE, GATEWAY, theirs, "169.254.169.254"):
            with pytest.raises((TimeoutError, OSError)):
                call(one, address, 8000, timeout_s=0.3)
    assert call(one, OUTSIDE, 80) > 100_000


def _addresses() -> list[str]:
    """The addresses of replicas that the machine has routes to."""
    lines = Path("/proc/thread-self/net/route").read_text().splitlines()[1:]
    routes = [line.split() for line in lines if line.startswith("nagara")]
    return [socket.inet_ntoa(bytes.fromhex(route[1])[::-1]) for route in routes]


@pytest.mark.root
@needs_nft
def test_nobody_outside_reaches_a_replica(lab, out):
    namespace = attached(lab, out)
    with namespace.open_socket() as server, lab._outside.open_netlink() as far:
        server.bind((INSIDE, 8000))
        server.listen()
        (address,) = lab.here(_addresses)
        far.add_route(far.link_names()["eth0"], MACHINE, to=address)
        with pytest.raises((TimeoutError, OSError)):
            call(lab._outside, address, 8000, timeout_s=0.3)


@pytest.mark.root
@needs_nft
def test_devices_and_routes_go_with_the_namespace(lab, out):
    namespace = attached(lab, out)
    assert lab.links() != []
    namespace.close()
    assert lab.left() == []
    assert lab.here(_addresses) == []


@pytest.mark.root
@needs_nft
def test_rules_that_somebody_has_flushed_are_there_again_with_the_next_replica(lab, out):
    attached(lab, out)
    lab.here(egress.nft, "flush ruleset\n")
    assert call(attached(lab, out), OUTSIDE, 80) > 100_000


@pytest.mark.root
@needs_nft
def test_a_machine_that_does_not_forward_is_named(lab, out):
    lab.forward(False)
    with pytest.raises(EgressError, match="does not forward packets") as raised:
        attached(lab, out)
    assert "ip_forward=1" in (raised.value.hint or "")
    assert lab.left() == []


@pytest.mark.root
def test_a_machine_without_nft_is_named(lab, out, monkeypatch):
    monkeypatch.setattr(egress, "find_nft", lambda: None)
    with pytest.raises(EgressError, match="nft is not here") as raised:
        attached(lab, out)
    assert "nftables" in (raised.value.hint or "")


@pytest.mark.root
@needs_nft
def test_the_doctor_tries_it_out(lab):
    assert "packets pass" in lab.here(egress.try_egress)
    assert lab.left() == []
    lab.here(
        egress.nft,
        "table ip other { chain f { type filter hook forward priority 5; policy drop; }\n}\n",
    )
    with pytest.raises(EgressError, match="do not pass"):
        lab.here(egress.try_egress)
    assert lab.here(tables) == ()
    lab.forward(False)
    with pytest.raises(EgressError, match="does not forward"):
        lab.here(egress.try_egress)


def test_resolvers_that_replicas_cannot_reach_are_passed_over(tmp_path):
    own, real = tmp_path / "resolv.conf", tmp_path / "real"
    own.write_text("# x\nnameserver 127.0.0.53\noptions edns0\n")
    assert machine_resolvers([own, real]) == ()
    real.write_text("nameserver fe80::1%eth0\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n")
    assert machine_resolvers([own, real]) == ("192.0.2.1", "192.0.2.2")
    assert Egress("x", ["192.0.2.9"]).resolv_conf() == "nameserver 192.0.2.9\n"
