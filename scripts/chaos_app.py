"""The app of the chaos run: answers in four ways, and writes down what it really did.

Each line on standard output that begins with LEDGER is one entry: `begin` when a request reaches
the code that acts, `end` when all of its answer was handed over. Runs inside replicas.

    GET  /canary        the same answer each time
    GET  /read/ID       "read ID"
    POST /deed/ID       {"id", "sha256" of the body}; not to be done twice
    GET  /stream/ID     ten server-sent events, then one that says "end"
    GET  /ws/ID         WebSocket: each message comes back with ID before it
"""

import asyncio
import hashlib
import sys

from aiohttp import web


def note(what: str, request: web.Request) -> None:
    """One entry of the ledger."""
    sys.stdout.write(f"LEDGER {what} {request.match_info['id']}\n")
    sys.stdout.flush()


async def read(request: web.Request) -> web.Response:
    note("begin", request)
    await asyncio.sleep(0.005)
    note("end", request)
    return web.Response(text=f"read {request.match_info['id']}")


async def work(request: web.Request) -> web.Response:
    digest = hashlib.sha256(await request.read()).hexdigest()
    note("begin", request)
    await asyncio.sleep(0.02)
    note("end", request)
    return web.json_response({"id": request.match_info["id"], "sha256": digest})


async def stream(request: web.Request) -> web.StreamResponse:
    note("begin", request)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number in range(10):
        await response.write(f"data: {request.match_info['id']} {number}\n\n".encode())
        await asyncio.sleep(0.02)
    await response.write(b"data: end\n\n")
    note("end", request)
    return response


async def talk(request: web.Request) -> web.WebSocketResponse:
    note("begin", request)
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        await socket.send_str(f"{request.match_info['id']} {message.data}")
    note("end", request)
    return socket


async def canary(_: web.Request) -> web.Response:
    return web.Response(text="sings")


def main() -> None:
    """Serves for ever on the port given."""
    app = web.Application(client_max_size=2**24)
    app.router.add_get("/canary", canary)
    app.router.add_get("/read/{id}", read)
    app.router.add_post("/deed/{id}", work)
    app.router.add_get("/stream/{id}", stream)
    app.router.add_get("/ws/{id}", talk)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)


main()
