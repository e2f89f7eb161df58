"""Which addresses may be called back. Pure, but for the look-up that `resolver` makes.

The control process stands where callers do not: beside loopback, the machine's private networks and
the clouds' credentials. So only hosts that the operator has named are called. One named in full may
lie anywhere; one that merely fits a pattern (`*.example.com`, `*`) only in the public Internet, and
that is checked of the very address that is connected to: a name that means another address the next
time gains nothing.
"""

import fnmatch
import ipaddress
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from nagara.control.refusal import Refusal, bad_request

MAX_URL_CHARS = 2048
_WILD = frozenset("*?[")


class CallbackHosts:
    """The operator's list.

    Args:
        patterns: host names or addresses, in full or with `*`; empty allows none.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        named = [pattern.lower().rstrip(".").strip("[]") for pattern in patterns]
        self._exact = frozenset(name for name in named if not _WILD & set(name))
        self._wild = tuple(name for name in named if _WILD & set(name))

    def check(self, text: str) -> str:
        """The address as it will be called.

        Raises:
            Refusal: 400 for what is no address to call, 403 for one that may not be called.
        """
        url = _parsed(text)
        host = _host(url)
        if host in self._exact:
            return str(url)
        if not any(fnmatch.fnmatchcase(host, pattern) for pattern in self._wild):
            raise _forbidden(host, "it is not among the hosts that nagara up --callback-host names")
        if (address := _as_address(host)) is not None and not is_public(address):
            raise _forbidden(host, "an address that is not public must be named in full")
        return str(url)

    def may_be_anywhere(self, host: str) -> bool:
        """Whether the operator has named the host in full."""
        return host.lower().rstrip(".") in self._exact


class CallbackResolver(AbstractResolver):
    """Looks names up and leaves out what may not be connected to."""

    def __init__(self, hosts: CallbackHosts, inner: AbstractResolver | None = None) -> None:
        self._hosts = hosts
        self._inner = inner or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError when nothing is left."""
        found = await self._inner.resolve(host, port, family)
        if self._hosts.may_be_anywhere(host):
            return found
        public = [one for one in found if is_public(one["host"])]
        if not public:
            raise OSError(None, f"{host} is at no public address")
        return public

    async def close(self) -> None:
        await self._inner.close()


def is_public(address: str) -> bool:
    """Whether an address lies in the public Internet, whatever it is wrapped in."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if inner is None and parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            parsed = inner
    return parsed.is_global and not parsed.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _parsed(text: str) -> URL:
    if len(text) > MAX_URL_CHARS or any(ord(char) <= 32 or ord(char) > 126 for char in text):
        raise bad_request("the callback is no address: at most 2,048 printable characters")
    try:
        url = URL(text)
        port = url.port
    except ValueError as error:
        raise bad_request(f"the callback is no address: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or not port:
        raise bad_request("the callback must be http:// or https:// and name a host")
    if url.user is not None or url.password is not None:
        raise bad_request("the callback must not hold a user or a password")
    return url.with_fragment(None)


def _host(url: URL) -> str:
    """As it is compared. Numbers in other writings than `127.0.0.1` are the system's to read."""
    host = (url.host or "").lower().rstrip(".")
    if _as_address(host) is None and ":" not in host:
        try:
            packed = socket.inet_aton(host)  # 127.1, 0x7f000001, 2130706433
        except OSError:
            return host
        return socket.inet_ntoa(packed)
    return host


def _as_address(host: str) -> str | None:
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return None


def _forbidden(host: str, why: str) -> Refusal:
    return Refusal(403, f"{host} may not be called back: {why}", code="callback_forbidden")
