"""Which headers cross the gateway. Pure.

Hop-by-hop headers end here, in both directions; so does the gateway's own key.
"""

from collections.abc import Mapping

from multidict import CIMultiDict, CIMultiDictProxy

COLD_START = "x-nagara-cold-start-ms"
QUEUE = "x-nagara-queue-ms"
REPLICA = "x-nagara-replica"

# Methods of which a second request does no harm: RFC 9110, section 9.2.2.
IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})

HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-connection", "proxy-authenticate",
        "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_ANSWERED_HERE = frozenset({"expect"})
_WEBSOCKET_HANDSHAKE = frozenset(
    {
        "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions",
        "sec-websocket-protocol", "sec-websocket-accept",
    }
)  # fmt: skip


def is_idempotent(method: str, headers: CIMultiDictProxy[str]) -> bool:
    """Whether the request may be sent twice: its method says so, or its client."""
    return method in IDEMPOTENT or "Idempotency-Key" in headers


def request_headers(
    headers: CIMultiDictProxy[str],
    *,
    peer: str,
    prefix: str,
    is_key_ours: bool,
    has_new_body: bool,
    is_websocket: bool = False,
) -> CIMultiDict[str]:
    """The headers to send to a replica.

    Args:
        peer: the client's address, added to `X-Forwarded-For`.
        prefix: the part of the path that was taken off, for `X-Forwarded-Prefix`.
        is_key_ours: `Authorization` carries a key of the gateway and must not reach the app.
        has_new_body: the body was rewritten, so its old length is wrong.
        is_websocket: the handshake is made anew.
    """
    dropped = HOP_BY_HOP | _ANSWERED_HERE | _named_by_connection(headers)
    if is_key_ours:
        dropped |= {"authorization"}
    if has_new_body:
        dropped |= {"content-length"}
    if is_websocket:
        dropped |= _WEBSOCKET_HANDSHAKE
    kept = _without(headers, dropped)
    forwarded = kept.get("X-Forwarded-For")
    kept["X-Forwarded-For"] = f"{forwarded}, {peer}" if forwarded else peer
    kept.setdefault("X-Forwarded-Proto", "http")
    if "Host" in kept:
        kept.setdefault("X-Forwarded-Host", kept["Host"])
    if prefix:
        kept["X-Forwarded-Prefix"] = prefix
    return kept


def response_headers(headers: CIMultiDictProxy[str], own: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers to send to the client: the replica's, and `own` in place of its namesakes."""
    kept = _without(headers, HOP_BY_HOP | _named_by_connection(headers))
    for name, value in own.items():
        kept[name] = value
    return kept


def _named_by_connection(headers: CIMultiDictProxy[str]) -> frozenset[str]:
    if "Connection" not in headers:
        return frozenset()
    values = ",".join(headers.getall("Connection"))
    return frozenset(name.strip().lower() for name in values.split(",") if name.strip())


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )
