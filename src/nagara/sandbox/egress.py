"""The way out of a replica's network namespace: a pair of devices, address translation, resolvers.

All replicas have the same address inside, so that what a snapshot holds of it (bound sockets, a
server's own notes) is right in each clone. Outside they differ: in the namespace itself, where the
replica has no rights, that address is translated to one of the replica's own, and the machine
translates this one to its own address.

    replica    eth0, INSIDE ── translated to 198.18.128.N in the replica's namespace
                 │ pair of devices; they go with the namespace, and so do its rules and routes
    machine    nagaraN ── forwarded, translated to the machine's address ── the networks outside

A replica reaches what the machine reaches, but neither the machine itself, save its resolvers, nor
other replicas, nor link-local addresses, where clouds keep their machines' credentials. Nobody
outside reaches a replica. IPv6 is not let through.

The machine's own rules are one table of nftables, of a name that belongs to one state folder; it
is made with the first replica that needs it and goes with the last node. What is forwarded must be
let through by the machine's other rules, too. Blocking: call from a worker thread. Needs root.
"""

import contextlib
import ipaddress
import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.sandbox.netlink import Netlink
from nagara.sandbox.netns import NetworkNamespace

INSIDE, GATEWAY = "198.18.0.2", "198.18.0.1"  # of all replicas; a range for networks under test
LINK, LINK_INSIDE = "nagara", "eth0"
TABLE = "nagara_"
_OUTSIDE = ipaddress.ip_network("198.18.128.0/17")
_MAC, _MAC_INSIDE = bytes.fromhex("026e61670001"), bytes.fromhex("026e61670002")
_MTU = 1500
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
_NFT_S = 10.0
_TRIAL_NEAR, _TRIAL_FAR, _TRIAL_PORT, _TRIAL_S = "198.18.1.1", "198.18.1.2", 80, 2.0
_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")  # often not on PATH
_numbers = itertools.count(random.randrange(_OUTSIDE.num_addresses))  # noqa: S311 - not a secret


class EgressError(NagaraError):
    """A replica cannot be given a way out."""


class Egress:
    """The way out for the replicas of one state folder.

    Args:
        name: what tells its table from others'.
        resolvers: name servers for replicas; empty takes the machine's.
    """

    def __init__(self, name: str, resolvers: Sequence[str] = ()) -> None:
        self.table = TABLE + name
        self._resolvers = tuple(resolvers)

    def attach(self, namespace: NetworkNamespace) -> None:
        """Gives a namespace its way out. Some ten milliseconds.

        Raises:
            EgressError: the machine lacks something; what, and how to get it, is said.
        """
        require_forwarding()
        nft(_machine_rules(self.table, self.resolvers()))
        try:
            with Netlink.here() as outer, namespace.open_netlink() as inner:
                number = _add_pair(outer, namespace)
                address = str(_OUTSIDE[number])
                link = outer.link_names()[f"{LINK}{number}"]
                outer.add_neighbour(link, INSIDE, _MAC_INSIDE)
                outer.set_up(link)
                link = inner.link_names()[LINK_INSIDE]
                inner.add_address(link, INSIDE)
                inner.add_neighbour(link, GATEWAY, _MAC)
                inner.set_up(link)
                inner.add_route(link, GATEWAY, source=INSIDE)
                nft(_inner_rules(address), namespace)
                # Last: from here on packets come back.
                outer.add_route(outer.link_names()[f"{LINK}{number}"], INSIDE, to=address)
        except OSError as error:
            raise EgressError(
                f"a way out of the replica cannot be made: {error.strerror}",
                hint="`nagara doctor` tries it out (CONFIG_VETH in the kernel)",
            ) from error

    def resolvers(self) -> tuple[str, ...]:
        """The name servers that replicas are told."""
        return self._resolvers or machine_resolvers(_RESOLVERS)

    def resolv_conf(self) -> str:
        """What a replica's /etc/resolv.conf says."""
        return "".join(f"nameserver {address}\n" for address in self.resolvers())

    def close(self) -> None:
        """Takes the machine's rules away, if there are any. No replica may need them any more."""
        if self.table in tables():
            nft(f"delete table inet {self.table}\n")


def try_egress() -> str:
    """Has a connection pass from a namespace through this machine's rules to another one.

    Raises `EgressError` when it does not; nothing is left.
    """
    inside, outside = NetworkNamespace.create(), NetworkNamespace.create()
    out = Egress(f"doctor_{os.getpid()}", [_TRIAL_FAR])
    try:
        out.attach(inside)
        _attach_trial(outside)
        with outside.open_socket() as server, inside.open_socket() as client:
            server.bind((_TRIAL_FAR, _TRIAL_PORT))
            server.listen(1)
            client.setblocking(True)
            client.settimeout(_TRIAL_S)
            client.connect((_TRIAL_FAR, _TRIAL_PORT))
    except TimeoutError:
        raise EgressError(
            "packets do not pass: other rules of this machine drop what it forwards",
            hint=f"let {LINK}* through (with Docker: iptables -I DOCKER-USER -i {LINK}+ -j ACCEPT)",
        ) from None
    finally:
        inside.close()
        outside.close()
        out.close()
    asked = ", ".join(machine_resolvers(_RESOLVERS)) or "none that replicas can reach; give --dns"
    return f"packets pass; name servers: {asked}"


def _attach_trial(outside: NetworkNamespace) -> None:
    """A network outside, for a moment."""
    with Netlink.here() as near, outside.open_netlink() as far:
        name = f"ngtrial{os.getpid() % 10**7}"
        near.add_pair(name, _MAC, _MTU, LINK_INSIDE, _MAC_INSIDE, outside.descriptor)
        for side, link, own, other, mac in (
            (near, name, _TRIAL_NEAR, _TRIAL_FAR, _MAC_INSIDE),
            (far, LINK_INSIDE, _TRIAL_FAR, _TRIAL_NEAR, _MAC),
        ):
            index = side.link_names()[link]
            side.add_address(index, own)
            side.add_neighbour(index, other, mac)
            side.set_up(index)
            side.add_route(index, other, to=other)


def require_forwarding() -> None:
    """Raises `EgressError` on a machine that passes nobody's packets on."""
    if _FORWARD.read_text().strip() == "0":
        raise EgressError(
            "this machine does not forward packets",
            where=str(_FORWARD),
            hint="sysctl -w net.ipv4.ip_forward=1, and in /etc/sysctl.d for the next boot",
        )


def tables() -> tuple[str, ...]:
    """The tables of nagara's on this machine; none where there is no nft."""
    if find_nft() is None:
        return ()
    with contextlib.suppress(EgressError):
        words = (line.split() for line in nft("list tables inet\n").splitlines())
        return tuple(line[2] for line in words if len(line) == 3 and line[2].startswith(TABLE))
    return ()


def machine_resolvers(files: Iterable[Path]) -> tuple[str, ...]:
    """The IPv4 name servers of the first of these files that names one which is not loopback."""
    for file in files:
        with contextlib.suppress(OSError):
            words = (line.split() for line in file.read_text(errors="replace").splitlines())
            named = (line[1] for line in words if len(line) > 1 and line[0] == "nameserver")
            if found := tuple(address for address in named if _is_reachable(address)):
                return found
    return ()


def find_nft() -> str | None:
    """The program, also where administrators' programs are not on PATH."""
    return shutil.which("nft") or shutil.which("nft", path=":".join(_FOLDERS))


def nft(rules: str, namespace: NetworkNamespace | None = None) -> str:
    """Has the kernel take rules, all of them or none, here or in a namespace; what nft says.

    Raises:
        EgressError: there is no nft, or it fails.
    """
    program = find_nft()
    if program is None:
        raise EgressError("the program nft is not here", hint="install the package nftables")
    command = [program, "-f", "-"]
    if namespace is not None:
        command = ["nsenter", f"--net={namespace.path}", *command]
    try:
        done = subprocess.run(
            command, input=rules, capture_output=True, text=True, timeout=_NFT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EgressError(f"nft cannot be run: {error}", where=program) from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["?"])[0]
        raise EgressError(f"the kernel does not take the rules: {said}", where=program)
    return done.stdout


def _add_pair(outer: Netlink, namespace: NetworkNamespace) -> int:
    """A pair with a number that no other replica of the machine has at the moment.

    Numbers are given in turn, so that late packets of a replica's past do not reach another.
    """
    for _ in range(_OUTSIDE.num_addresses):
        number = next(_numbers) % (_OUTSIDE.num_addresses - 2) + 1
        with contextlib.suppress(FileExistsError):
            outer.add_pair(
                *(f"{LINK}{number}", _MAC, _MTU, LINK_INSIDE, _MAC_INSIDE, namespace.descriptor)
            )
            return number
    raise EgressError("all addresses for replicas are in use")


def _is_reachable(address: str) -> bool:
    try:
        return not ipaddress.IPv4Address(address).is_loopback
    except ValueError:  # IPv6, or nonsense
        return False


def _inner_rules(address: str) -> str:
    return f"""
table ip nagara {{
  chain out {{
    type nat hook postrouting priority srcnat
    oifname "{LINK_INSIDE}" snat to {address}
  }}
}}
"""


def _machine_rules(table: str, resolvers: Sequence[str]) -> str:
    """Replaces the table as a whole; what is under way stays. The size of segments is bounded by
    the way they take: not every machine outside hears that packets are too long."""
    links = f'"{LINK}*"'
    asked = ", ".join(resolvers)
    ask = f"iifname {links} ip daddr {{ {asked} }} th dport 53 accept" if asked else ""
    return f"""
table inet {table}
delete table inet {table}
table inet {table} {{
  chain machine {{
    type filter hook input priority filter
    {ask}
    iifname {links} drop
  }}
  chain forward {{
    type filter hook forward priority filter
    iifname {links} oifname {links} drop
    iifname {links} meta nfproto ipv6 drop
    iifname {links} ip saddr != {_OUTSIDE} drop
    iifname {links} ip daddr 169.254.0.0/16 drop
    oifname {links} ct state != {{ established, related }} drop
    iifname {links} tcp flags syn tcp option maxseg size set rt mtu
    oifname {links} tcp flags syn tcp option maxseg size set rt mtu
  }}
  chain outgoing {{
    type nat hook postrouting priority srcnat
    ip saddr {_OUTSIDE} oifname != {links} masquerade
  }}
}}
"""
