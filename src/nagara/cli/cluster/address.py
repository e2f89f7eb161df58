"""Where a Ray cluster is, as a person says it: auto, HOST:PORT, ray://HOST:PORT, or head[:PORT]."""

from nagara.base.errors import UsageError
from nagara.node.network.address import split_address

AUTO, HEAD = "auto", "head"
CLIENT = "ray://"  # of a Ray client server
HEAD_PORT, CLIENT_PORT = 6379, 10001  # Ray's own
_WORKERS = range(10002, 20000)  # ports that Ray's workers take


def checked_address(address: str, where: str) -> str:
    """The address itself. Raises `UsageError` for what Ray would take for something else."""
    if address != AUTO:
        try:
            split_address(address.removeprefix(CLIENT))
        except UsageError:
            raise UsageError(
                f"{address!r} is no address of a Ray cluster", where=where,
                hint=f"auto, HOST:{HEAD_PORT}, or ray://HOST:{CLIENT_PORT} of a Ray client server",
            ) from None  # fmt: skip
    return address


def head_port(address: str, where: str) -> int | None:
    """The port of an own head, for `head` and `head:PORT`; None: it is another's address."""
    word, colon, port = address.partition(":")
    if word != HEAD:
        return None
    if not colon:
        return HEAD_PORT
    if not port.isdecimal() or not 0 < int(port) < 65536 or int(port) in _WORKERS:
        raise UsageError(
            f"{port!r} is no port for a head", where=where,
            hint=f"head:PORT, not from {_WORKERS[0]} to {_WORKERS[-1]}: Ray's workers take those",
        )  # fmt: skip
    return int(port)


def hint_for(what: str, address: str) -> str:
    """What to do where Ray cannot be reached and says this."""
    if "ersion mismatch" in what:
        return "install the same Ray and Python here and on every machine: pip install ray==VERSION"
    if address.startswith(CLIENT):
        return (
            f"the cluster's head serves Ray clients, by itself at port {CLIENT_PORT}, where "
            "'ray[client]' is installed, of the same version as here; what it says of one that it "
            "does not serve is in /tmp/ray/session_latest/logs there"
        )
    return (
        "a node of the cluster must run here (`ray start --address=HOST:PORT`), or the "
        f"address must be that of a Ray client server: ray://HOST:{CLIENT_PORT}"
    )
