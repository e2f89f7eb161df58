"""WebSocket connections through the gateway.

Two connections, one to the client and one to the replica, with every message, ping and close
passed on as it is. The handshake is made anew on both sides; the subprotocol is the one the
replica chose. Called from a request's task; cancelling it closes both sides.
"""

import asyncio
from collections.abc import Mapping

import aiohttp
from aiohttp import WSMsgType, web
from multidict import CIMultiDict
from yarl import URL

from nagara.control.refusal import Refusal

_GOING_AWAY = 1001
_NO_STATUS = 1005
_CLOSE_WAIT_S = 5.0


async def relay_websocket(
    request: web.BaseRequest,
    session: aiohttp.ClientSession,
    url: URL,
    headers: CIMultiDict[str],
    own: Mapping[str, str],
) -> web.StreamResponse:
    """Joins the client of `request` with the replica behind `session` until one side closes."""
    offered = [
        name.strip()
        for value in request.headers.getall("Sec-WebSocket-Protocol", [])
        for name in value.split(",")
        if name.strip()
    ]
    try:
        replica = await session.ws_connect(
            url, protocols=offered, headers=headers, autoping=False, autoclose=False,
            max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_WAIT_S),
        )  # fmt: skip
    except aiohttp.WSServerHandshakeError as error:
        status = error.status if error.status >= 400 else 502
        message = f"the replica refused the WebSocket: {error.message}"
        raise Refusal(status, message, code="websocket_refused") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise Refusal(502, f"the replica broke off: {error}", code="replica_failed") from error
    async with replica:
        chosen = (replica.protocol,) if replica.protocol else ()
        client = web.WebSocketResponse(
            protocols=chosen, autoping=False, autoclose=False, max_msg_size=0, compress=False
        )
        client.headers.update(own)
        await client.prepare(request)
        await _relay(client, replica)
        return client


async def _relay(client: web.WebSocketResponse, replica: aiohttp.ClientWebSocketResponse) -> None:
    """Passes messages both ways; the first side to end ends the other."""
    up = asyncio.create_task(_pass_on(client, replica))
    down = asyncio.create_task(_pass_on(replica, client))
    try:
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
    finally:
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        if not client.closed:
            await client.close(code=_GOING_AWAY)
        if not replica.closed:
            await replica.close(code=_GOING_AWAY)


_Side = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _pass_on(source: _Side, sink: _Side) -> None:
    """Passes the messages of one side on to the other until it closes."""
    while True:
        message = await source.receive()
        if message.type is WSMsgType.TEXT:
            await sink.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await sink.send_bytes(message.data)
        elif message.type is WSMsgType.PING:
            await sink.ping(message.data)
        elif message.type is WSMsgType.PONG:
            await sink.pong(message.data)
        elif message.type is WSMsgType.CLOSE:
            # 1005 stands for "no code given" and may not be sent.
            code = message.data if message.data != _NO_STATUS else 1000
            await sink.close(code=code, message=(message.extra or "").encode())
            await source.close(code=code)
            return
        else:
            return
