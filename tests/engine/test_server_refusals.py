"""What the server cannot answer now, it says so at once, and nothing of it is left behind."""

import asyncio
import logging

import pytest
from aiohttp import ClientSession
from engine_server import GOOD, HELLO, serving


async def test_before_a_first_token_everything_answers_503(tiny):
    async with serving(tiny, load=False) as (server, url), ClientSession() as http:
        for path in ("/health", "/v1/models"):
            async with http.get(url + path) as answer:
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "loading"
        await server.load()
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 200


async def test_what_is_refused_is_refused_with_its_status_also_when_streaming(served):
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    body = {"model": "tiny", "messages": HELLO, "response_format": form, "stream": True}
    where = f"{served}/v1/chat/completions"
    async with ClientSession() as http, http.post(where, json=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "response_format"


async def test_too_many_at_once_are_told_so_also_when_streaming(tiny):
    async with (
        serving(tiny, max_concurrency=1, max_waiting=1) as (server, url),
        ClientSession() as http,
    ):
        body = {"model": "tiny", "prompt": "the", "max_tokens": 400, "n": 3, "ignore_eos": True}
        for stream in (True, False):
            async with http.post(
                f"{url}/v1/completions", json={**body, "stream": stream}
            ) as answer:
                assert answer.status == 429
                assert (await answer.json())["error"]["code"] == "overloaded"
        # nothing of them is still computed
        short = {"model": "tiny", "prompt": "the", "max_tokens": 1, "n": 2}
        async with http.post(f"{url}/v1/completions", json=short) as answer:
            assert answer.status == 200
        assert server.engine.stats().running == 0


async def test_a_server_whose_engine_has_failed_says_so(tiny, monkeypatch):
    logging.getLogger("nagara.engine").setLevel(logging.CRITICAL)

    def fail(_):
        raise RuntimeError("the device is gone")

    async with serving(tiny) as (server, url), ClientSession() as http:
        monkeypatch.setattr(server.engine._model, "forward", fail)
        async with http.post(f"{url}/v1/completions", json=GOOD) as answer:
            assert answer.status == 500
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 503
            assert "device is gone" in (await answer.json())["error"]["message"]
        assert "device is gone" in str(await server.failed())


async def test_a_client_that_goes_away_ends_its_request(tiny):
    async with serving(tiny, max_concurrency=1) as (_, url), ClientSession() as http:
        body = {"model": "tiny", "prompt": "the", "max_tokens": 500, "ignore_eos": True}
        for stream in (True, False):
            asked = http.post(f"{url}/v1/completions", json={**body, "stream": stream})
            if stream:
                async with asked as answer:
                    await answer.content.readline()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asked, 0.05)
            # The only place is free again: another request is answered before 500 tokens are made
            short = {"model": "tiny", "prompt": "the", "max_tokens": 1}
            async with http.post(f"{url}/v1/completions", json=short) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("number", ["9" * 5000, "[" * 100_000])
async def test_what_ends_the_json_parser_is_the_clients_mistake(served, number):
    body = f'{{"model": "tiny", "prompt": "the", "max_tokens": {number}}}'
    call = {"id": "1", "type": "function", "function": {"name": "x", "arguments": number}}
    chat = {"model": "tiny", "messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}
    async with ClientSession() as http:
        async with http.post(f"{served}/v1/completions", data=body) as answer:
            assert answer.status == 400
        async with http.post(f"{served}/v1/chat/completions", json=chat) as answer:
            assert answer.status == 400
