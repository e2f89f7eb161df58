"""OpenAI's own client works against the server; what it cannot do is refused in OpenAI's shape."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest
from aiohttp import ClientSession
from engine_server import GOOD, HELLO, POINT, TOOL, client_of


async def test_chat_whole_and_streamed_give_the_same_text(tiny):
    async with client_of(tiny) as client:
        asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 30}
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


async def test_completions_of_several_prompts_and_choices_keep_their_order(tiny):
    async with client_of(tiny) as client:
        asked = {"model": "tiny", "prompt": ["the quick", "lazy"], "n": 2, "seed": 5}
        both = await client.completions.create(**asked, max_tokens=12)
        again = await client.completions.create(**asked, max_tokens=12)
        alone = await client.completions.create(
            model="tiny", prompt="lazy", seed=5, n=1, max_tokens=12
        )
        stream = await client.completions.create(**asked, max_tokens=12, stream=True)
        texts = ["", "", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert [c.text for c in both.choices] == [c.text for c in again.choices] == texts
    assert both.choices[2].text == alone.choices[0].text
    assert both.choices[0].text != both.choices[1].text


async def test_token_ids_and_their_text_are_the_same_prompt(tiny):
    async with client_of(tiny) as client:
        from nagara.engine.tokenizer import Tokenizer

        ids = Tokenizer(tiny).encode("the lazy dog")
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 10}
        by_ids = await client.completions.create(prompt=ids, **asked)
        by_text = await client.completions.create(prompt="the lazy dog", **asked)
    assert by_ids.choices[0].text == by_text.choices[0].text


async def test_logprobs_come_in_both_shapes(tiny):
    async with client_of(tiny) as client:
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 4}
        chat = await client.chat.completions.create(
            messages=HELLO, logprobs=True, top_logprobs=3, **asked
        )
        plain = await client.completions.create(prompt="the", logprobs=2, **asked)
    content = chat.choices[0].logprobs.content
    assert content
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    assert len(plain.choices[0].logprobs.tokens) == len(plain.choices[0].logprobs.token_logprobs)


async def test_models_are_listed(tiny):
    async with client_of(tiny) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_a_request_that_names_no_model_means_the_one_there_is(served):
    asked = {"prompt": "the", "max_tokens": 1}
    async with ClientSession() as http, http.post(f"{served}/v1/completions", json=asked) as answer:
        assert answer.status == 200
        assert (await answer.json())["model"] == "tiny"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 100_000, 400, None),
        ({**GOOD, "model": "other"}, 404, "model"),
        ({"model": "tiny"}, 400, "prompt"),
        ({"model": "tiny", "prompt": ""}, 400, "prompt"),
        ({"model": "tiny", "prompt": []}, 400, "prompt"),
        ({"model": "tiny", "prompt": [[]]}, 400, "prompt"),
        ({"model": "tiny", "prompt": [1, "a"]}, 400, "prompt"),
        ({"model": "tiny", "prompt": [100000]}, 400, "prompt"),
        ({"model": "tiny", "prompt": [-1]}, 400, "prompt"),
        ({"model": "tiny", "prompt": "the " * 600}, 400, "max_tokens"),
        ({**GOOD, "max_tokens": 0}, 400, "max_tokens"),
        ({**GOOD, "max_tokens": 100000}, 400, "max_tokens"),
        ({**GOOD, "max_tokens": "many"}, 400, "max_tokens"),
        ({**GOOD, "max_tokens": True}, 400, "max_tokens"),
        ({**GOOD, "temperature": -1}, 400, "temperature"),
        ({**GOOD, "top_p": 0}, 400, "top_p"),
        ({**GOOD, "n": 0}, 400, "n"),
        ({**GOOD, "stop": [""]}, 400, "stop"),
        ({**GOOD, "stop": 3}, 400, "stop"),
        ({**GOOD, "seed": 0.5}, 400, "seed"),
        ({**GOOD, "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({**GOOD, "logprobs": 100}, 400, "logprobs"),
        ({**GOOD, "echo": True, "logprobs": 1}, 400, "echo"),
        ({**GOOD, "suffix": "x"}, 400, "suffix"),
        ({**GOOD, "best_of": 3}, 400, "best_of"),
        ({**GOOD, "surprise": 1}, 400, "surprise"),
        ({**GOOD, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_bad_request_is_refused_with_its_parameter_named(served, body, status, param):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with ClientSession() as http, http.post(f"{served}/v1/completions", data=raw) as answer:
        assert answer.status == status
        error = (await answer.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "audio": {}}, "audio"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        (
            {
                "messages": HELLO,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "see"}},
            },
            "tool_choice",
        ),
        (
            {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "regex": "a"},
            "tool_choice",
        ),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "tools"),
    ],
)
async def test_a_bad_chat_is_refused_with_its_parameter_named(served, more, param):
    async with ClientSession() as http:
        body = {"model": "tiny", **more}
        async with http.post(f"{served}/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == param


async def test_a_body_of_ten_megabytes_is_refused(served):
    async with ClientSession() as http:
        data = io.BytesIO(b'{"prompt": "' + b"x" * 10_000_000)
        async with http.post(f"{served}/v1/completions", data=data) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_null_counts_as_not_given_and_neutral_values_pass(served):
    body = {**GOOD, "stop": None, "echo": False, "logit_bias": None, "user": "me", "best_of": 1}
    async with ClientSession() as http, http.post(f"{served}/v1/completions", json=body) as answer:
        assert answer.status == 200


async def test_a_text_and_a_conversation_can_be_tokenized_and_back(served):
    async with ClientSession() as http:
        async with http.post(f"{served}/tokenize", json={"prompt": "the lazy dog"}) as answer:
            value = await answer.json()
        assert value["count"] == len(value["tokens"])
        async with http.post(f"{served}/detokenize", json={"tokens": value["tokens"]}) as answer:
            assert (await answer.json())["prompt"] == "the lazy dog"
        async with http.post(f"{served}/tokenize", json={"messages": HELLO}) as answer:
            assert (await answer.json())["count"] > value["count"]
        async with http.post(f"{served}/tokenize", json={}) as answer:
            assert answer.status == 400
        async with http.post(f"{served}/detokenize", json={"tokens": [10**6]}) as answer:
            assert answer.status == 400


async def test_metrics_count_requests_and_tokens_and_say_whether_overlap_is_on(served):
    async with ClientSession() as http:
        body = {**GOOD, "max_tokens": 5, "ignore_eos": True}
        await (await http.post(f"{served}/v1/completions", json=body)).read()
        await (await http.post(f"{served}/v1/completions", data=b"{")).read()
        async with http.get(f"{served}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['nagara_engine_requests_total{status="200"}'] == "1"
    assert values['nagara_engine_requests_total{status="400"}'] == "1"
    assert values["nagara_engine_completion_tokens_total"] == "5"
    assert values["nagara_engine_depth"] == "1"
    assert values["nagara_engine_first_token_seconds_count"] == "1"
    for name in values:
        bare = name.split("{")[0].removesuffix("_bucket").removesuffix("_sum")
        assert any(line.startswith(f"# HELP {bare.removesuffix('_count')} ") for line in lines)


async def test_sleep_and_wake_need_the_token_of_the_replica(served, monkeypatch, tmp_path):
    async with ClientSession() as http:

        async def post(path, token=None):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with http.post(served + path, headers=headers) as answer:
                return answer.status

        async def health():
            async with http.get(f"{served}/health") as answer:
                return answer.status

        monkeypatch.delenv("NAGARA_REPLICA_TOKEN", raising=False)
        assert await post("/sleep", "anything") == 403
        monkeypatch.setenv("NAGARA_REPLICA_TOKEN", "secret")
        assert await post("/sleep") == 403
        assert await post("/sleep", "wrong") == 403
        assert await health() == 200
        assert await post("/sleep", "secret") == 200
        assert await health() == 503
        async with http.post(f"{served}/v1/completions", json=GOOD) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "asleep"
        (tmp_path / "token").write_text("newer\n")
        monkeypatch.setenv("NAGARA_REPLICA_TOKEN_FILE", str(tmp_path / "token"))
        assert await post("/wake", "secret") == 403
        assert await post("/wake", "newer") == 200
        async with http.post(f"{served}/v1/completions", json=GOOD) as answer:
            assert answer.status == 200


async def test_an_answer_follows_a_json_schema(tiny):
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with client_of(tiny) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, response_format=form, max_tokens=60, seed=1
        )
        assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
        bad = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO, response_format=bad)
        assert caught.value.body["param"] == "response_format"


async def test_tool_calls_come_back_parsed_whole_and_streamed(tiny):
    """A regular expression makes the tiny model write the call that a trained one would."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    pattern = r'hm <tool_call>\{"name": "look", "arguments": \{"at": "[a-c]"\}\}</tool_call>'
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [TOOL],
        "max_tokens": 100,
        "seed": 3,
        "extra_body": {"regex": pattern},
    }
    async with client_of(tiny) as client:
        whole = (await client.chat.completions.create(**asked)).choices[0]
        call = whole.message.tool_calls[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "hm "
        assert call.function.name == "look"
        assert set(json.loads(call.function.arguments)) == {"at"}
        stream = await client.chat.completions.create(**asked, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        deltas = [d for c in chunks for d in c.delta.tool_calls or []]
        assert [d.function.arguments for d in deltas] == [call.function.arguments]
        assert "".join(c.delta.content or "" for c in chunks) == "hm "
        assert chunks[-1].finish_reason == "tool_calls"
        earlier = [
            *HELLO,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "seen"},
        ]
        again = await client.chat.completions.create(
            model="tiny", messages=earlier, max_tokens=3, tools=[TOOL]
        )
        assert again.choices


@pytest.mark.parametrize(
    ("choice", "name"),
    [({"type": "function", "function": {"name": "point"}}, "point"), ("required", None)],
)
async def test_a_tool_that_must_be_called_is_called(tiny, choice, name):
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    asked = {"model": "tiny", "messages": HELLO, "tool_choice": choice, "seed": 5}
    tools = [TOOL, POINT] if name else [POINT]
    async with client_of(tiny) as client:
        whole = await client.chat.completions.create(**asked, tools=tools, max_tokens=200)
        stream = await client.chat.completions.create(
            **asked, tools=tools, max_tokens=200, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == chunks[-1].finish_reason == "tool_calls"
    assert not whole.choices[0].message.content
    assert call.function.name == "point"
    assert json.loads(call.function.arguments)["at"] in ("here", "there")
    deltas = [d for chunk in chunks for d in chunk.delta.tool_calls or []]
    assert [d.function.arguments for d in deltas] == [call.function.arguments]


async def test_an_echo_puts_the_prompt_before_each_answer(tiny):
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 6, "n": 2}
    prompts = ["the quick", "lazy"]
    async with client_of(tiny) as client:
        plain = await client.completions.create(**asked, prompt=prompts)
        echoed = await client.completions.create(**asked, prompt=prompts, echo=True)
        stream = await client.completions.create(**asked, prompt=prompts, echo=True, stream=True)
        texts = [""] * 4
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    expected = [prompts[i // 2] + choice.text for i, choice in enumerate(plain.choices)]
    assert [choice.text for choice in echoed.choices] == texts == expected


@pytest.fixture
def process(tiny):
    """The server as a process of its own: (url, process)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from nagara.cli.engine import engine; engine()"]
    running = subprocess.Popen(
        [*command, "serve", str(tiny), "--port", str(port), "--served-model-name", "tiny"],
        env={**os.environ, "PYTHONWARNINGS": "default"},
        stderr=subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except (urllib.error.URLError, ConnectionError):
            assert running.poll() is None
            time.sleep(0.1)
    yield url, running
    if running.poll() is None:
        running.kill()
    running.communicate()


def test_sigterm_ends_the_process_though_it_is_answering(process):
    url, running = process
    body = {"model": "tiny", "prompt": "the", "max_tokens": 500, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.readline()
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=20) == 0
