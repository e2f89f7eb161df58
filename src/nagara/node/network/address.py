"""Where an agent is reached: `tcp://HOST:PORT`, or the path of a Unix socket (`unix:PATH`)."""

from pathlib import Path
from urllib.parse import urlsplit

from nagara.base.errors import UsageError

_SCHEME = "tcp://"


def is_tcp(address: str) -> bool:
    """Whether the agent is reached over a network."""
    return address.startswith(_SCHEME)


def socket_path(address: str) -> Path:
    """The path of an agent's Unix socket."""
    return Path(address.removeprefix("unix:"))


def split_address(address: str, *, is_own: bool = False) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT` or `HOST:PORT`. Raises `UsageError`.

    `is_own`: to listen at, where port 0 takes a free one.
    """
    try:
        parts = urlsplit(_SCHEME + address.removeprefix(_SCHEME))
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if (
        not host
        or (not port and not (is_own and port == 0))
        or parts.path
        or parts.query
        or parts.username is not None
    ):
        raise UsageError(
            "this is no address of an agent", where=address,
            hint="HOST:PORT, an IPv6 host in brackets: [::1]:9300",
        )  # fmt: skip
    assert port is not None
    return host, port


def tcp_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"{_SCHEME}[{host}]:{port}" if ":" in host else f"{_SCHEME}{host}:{port}"
