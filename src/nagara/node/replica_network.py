"""The network of a replica: a namespace of its own, closed or with a way out.

Called on the node's loop, but for `tell_resolvers`, which blocks for as long as a small file takes.
"""

import contextlib
import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from nagara.contract.replica import ReplicaSpec
from nagara.node.owned_tasks import in_thread
from nagara.sandbox.egress import Egress
from nagara.sandbox.netns import NetworkNamespace

_RESOLV_CONF = "resolv.conf"


class ReplicaNetworks:
    """Namespaces for the replicas of one node.

    Args:
        state: the node's folder, which names its rules on this machine.
        resolvers: name servers that replicas with a way out are told; empty takes the machine's.
    """

    def __init__(self, state: Path, resolvers: Sequence[str] = ()) -> None:
        self._egress = Egress(network_name(state), resolvers)

    async def create(self, spec: ReplicaSpec) -> NetworkNamespace:
        """A namespace as the app wants it. Raises `EgressError`."""
        namespace = NetworkNamespace.create()
        if spec.network == "egress":
            try:
                await in_thread(self._egress.attach, namespace)
            except BaseException:
                namespace.close()
                raise
        return namespace

    def tell_resolvers(self, root: Path, spec: ReplicaSpec) -> None:
        """Writes a replica with a way out the names servers it may ask, below its mounted root."""
        if spec.network == "egress":
            with contextlib.suppress(NotADirectoryError, FileNotFoundError):  # no /etc of its own
                _replace(root / "etc", self._egress.resolv_conf().encode())

    async def took_over(self, replicas: Collection[str]) -> None:
        """Rules that an earlier node has left go, unless replicas of it go on."""
        if not replicas:
            await self.close()

    async def close(self) -> None:
        """No replica is left."""
        await in_thread(self._egress.close)


def network_name(state: Path) -> str:
    """What a node's rules are called on this machine."""
    return hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:12]


def _replace(etc: Path, content: bytes) -> None:
    """Never through a link: the image may be anybody's. What is right already stays as it is."""
    folder = os.open(etc, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            there = os.open(_RESOLV_CONF, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            with open(there, "rb") as file:  # noqa: PTH123 - an open descriptor
                if file.read() == content:
                    return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_RESOLV_CONF, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        made = os.open(_RESOLV_CONF, flags, 0o644, dir_fd=folder)
        with open(made, "wb") as file:  # noqa: PTH123
            os.fchmod(made, 0o644)
            file.write(content)
    finally:
        os.close(folder)
