"""Which commands are OpenAI servers, and by what name they know their model. Pure.

It recognises servers by their command line, as people start them: nagara's own engine, vLLM,
SGLang and llama.cpp's server, also behind `python -m` or an absolute path.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from nagara.contract.replica import Canary

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """A recognised server. `must_name_model`: its requests may not leave `model` out."""

    kind: str
    model: str | None
    must_name_model: bool


def recognise(command: Sequence[str]) -> OpenAIServer | None:
    """The OpenAI server that `command` starts, or None if it is not a known one."""
    words = [PurePosixPath(word).name if i == 0 else word for i, word in enumerate(command)]
    if words[:1] and words[0].startswith("python") and words[1:2] == ["-m"]:
        words = words[2:]
    if words[:3] == ["nagara", "engine", "serve"] or words[:3] == ["nagara.cli", "engine", "serve"]:
        path = _first_argument(words[3:])
        named = _option(words, "--served-model-name")
        model = named or (PurePosixPath(path).name if path else None)
        return OpenAIServer("nagara", model, must_name_model=False)
    if words[:2] == ["vllm", "serve"]:
        named = _option(words, "--served-model-name")
        return OpenAIServer("vllm", named or _first_argument(words[2:]), must_name_model=True)
    if words[:1] == ["vllm.entrypoints.openai.api_server"]:
        named = _option(words, "--served-model-name")
        return OpenAIServer("vllm", named or _option(words, "--model"), must_name_model=True)
    if words[:1] == ["sglang.launch_server"] or words[:2] == ["sglang", "serve"]:
        named = _option(words, "--served-model-name")
        path = _option(words, "--model-path") or _option(words, "--model")
        return OpenAIServer("sglang", named or path, must_name_model=True)
    if words[:1] == ["llama-server"]:
        return OpenAIServer("llama.cpp", _option(words, "--alias"), must_name_model=False)
    return None


def default_canary(server: OpenAIServer | None, ready: str) -> Canary:
    """A greedy completion for a known OpenAI server, else the readiness path's own answer."""
    if server is None or (server.must_name_model and server.model is None):
        return Canary(path=ready)
    body: dict[str, object] = {
        "prompt": "One, two, three, four, five,",
        "max_tokens": 4,  # each costs a step of every restored start
        "temperature": 0,
        "logprobs": 1,
    }
    if server.model is not None:
        body["model"] = server.model
    return Canary(path=_COMPLETIONS, body=json.dumps(body, sort_keys=True), is_openai=True)


def is_openai_path(path: str) -> bool:
    """Whether an answer from `path` is compared as an OpenAI answer."""
    return path.partition("?")[0] in (_COMPLETIONS, _CHAT)


def with_logprobs(
    server: OpenAIServer | None, path: str, body: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The body of an app's own canary, which asks a known server for logprobs as well. Others may
    refuse a request that does."""
    if body is None:
        return None
    if server is None or not is_openai_path(path):
        return dict(body)
    asked = True if path.partition("?")[0] == _CHAT else 1
    return {"logprobs": asked, **body}


def _option(words: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _first_argument(words: Sequence[str]) -> str | None:
    return words[0] if words and not words[0].startswith("-") else None
