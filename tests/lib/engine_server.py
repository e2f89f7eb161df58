"""The engine's server in this process, and OpenAI's client for it."""

import asyncio
from contextlib import asynccontextmanager

import openai
from aiohttp import test_utils

from nagara.engine.server import ModelServer, ServeSettings
from nagara.engine.settings import EngineSettings

GOOD = {"model": "tiny", "prompt": "the"}


@asynccontextmanager
async def serving(folder, *, load=True, **engine):
    settings = ServeSettings(
        folder, 0, model_name="tiny", engine=EngineSettings(dtype="float32", **engine)
    )
    server = ModelServer(settings)
    http = test_utils.TestServer(server.application(), handler_cancellation=True)
    await http.start_server()
    try:
        if load:
            await server.load()
        yield server, str(http.make_url("/")).rstrip("/")
    finally:
        await asyncio.to_thread(server.close)
        await http.close()


@asynccontextmanager
async def client_of(folder, **engine):
    async with (
        serving(folder, **engine) as (_, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


HELLO = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
POINT = {
    "type": "function",
    "function": {
        "name": "point",
        "parameters": {
            "properties": {"at": {"enum": ["here", "there"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
