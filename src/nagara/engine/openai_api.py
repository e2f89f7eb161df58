"""OpenAI's request and answer shapes for completions and chat, as plain data.

Pure: bodies in, frozen calls out; pieces in, JSON-ready objects out. Field names follow
https://platform.openai.com/docs/api-reference; beyond them `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `ignore_eos` and `stop_token_ids` are understood.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nagara.engine.errors import RequestError
from nagara.engine.fields import Fields, is_ids
from nagara.engine.openai_tools import parse_tools
from nagara.engine.request import MAX_CHOICES, FinishReason, Guide, SamplingParams, TokenLogprob

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for completions
MAX_PROMPTS = 128

TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Call:
    """What completions and chat have in common once parsed."""

    model: str | None
    params: SamplingParams
    n: int
    is_stream: bool
    wants_usage: bool  # a last chunk with the token counts, when streaming


@dataclass(frozen=True, slots=True)
class CompletionCall:
    call: Call
    prompts: tuple[str | list[int], ...]
    has_echo: bool  # the answer's text begins with the prompt's


@dataclass(frozen=True, slots=True)
class ChatCall:
    call: Call
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_values: dict[str, Any]
    has_max_tokens: bool  # otherwise the answer may fill the context


def parse_completion(body: dict[str, Any]) -> CompletionCall:
    """Raises RequestError naming the parameter at fault."""
    fields = Fields(body)
    prompts = _prompts(fields.any("prompt"))
    logprobs = fields.integer("logprobs", -1)
    max_tokens = fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS)
    has_echo = fields.flag("echo")
    if has_echo and logprobs >= 0:
        raise RequestError("log probabilities of the prompt are not computed", where="echo")
    fields.only("suffix", "")
    n = fields.integer("n", 1)
    fields.only("best_of", n)
    call = _call(fields, max_tokens, None if logprobs < 0 else logprobs, n)
    return CompletionCall(call, prompts, has_echo)


def parse_chat(body: dict[str, Any], context: int) -> ChatCall:
    """Raises RequestError naming the parameter at fault."""
    fields = Fields(body)
    messages = _messages(fields.any("messages"))
    old, new = fields.integer("max_tokens", 0), fields.integer("max_completion_tokens", 0)
    given = {"max_tokens", "max_completion_tokens"} & {k for k, v in body.items() if v is not None}
    max_tokens = (new if "max_completion_tokens" in given else old) if given else context
    alternatives = fields.integer("top_logprobs", 0)
    wants_logprobs = fields.flag("logprobs")
    if alternatives and not wants_logprobs:
        raise RequestError("top_logprobs needs logprobs", where="top_logprobs")
    tools, forced = parse_tools(fields.any("tools"), fields.any("tool_choice"))
    fields.only("functions", [])
    fields.only("modalities", ["text"])
    fields.only("parallel_tool_calls", True, False)
    values = fields.any("chat_template_kwargs") or {}
    if not isinstance(values, dict):
        raise RequestError("chat_template_kwargs must be an object", where="chat_template_kwargs")
    n = fields.integer("n", 1)
    call = _call(fields, max_tokens, alternatives if wants_logprobs else None, n, forced)
    return ChatCall(call, messages, tools, values, bool(given))


def parse_tokenize(body: dict[str, Any]) -> str | list[dict[str, Any]]:
    """A text, or the messages of a conversation, to be turned into tokens."""
    fields = Fields(body)
    prompt, messages = fields.text("prompt"), fields.any("messages")
    fields.ignore("model")
    fields.close()
    if (prompt is None) == (messages is None):
        raise RequestError("either prompt or messages must be given", where="prompt")
    return prompt if prompt is not None else _messages(messages)


def parse_detokenize(body: dict[str, Any]) -> list[int]:
    fields = Fields(body)
    tokens = fields.any("tokens")
    fields.ignore("model")
    fields.close()
    if not is_ids(tokens):
        raise RequestError("tokens must be a list of token ids", where="tokens")
    return list(tokens)


def _call(
    fields: Fields, max_tokens: int, logprobs: int | None, n: int, forced: Guide | None = None
) -> Call:
    model = fields.text("model")
    if not 1 <= n <= MAX_CHOICES:
        raise RequestError(f"n must be in [1, {MAX_CHOICES}]", where="n")
    seed = fields.any("seed")
    if seed is not None and type(seed) is not int:
        raise RequestError("seed must be an integer", where="seed")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens", 0),
        temperature=fields.number("temperature", 1.0),
        top_k=fields.integer("top_k", 0),
        top_p=fields.number("top_p", 1.0),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        logit_bias=_logit_bias(fields.any("logit_bias")),
        seed=seed,
        stop=fields.strings("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        guide=_guide(fields.any("response_format"), fields.text("regex"), forced),
    )
    is_stream = fields.flag("stream")
    wants_usage = _stream_options(fields.any("stream_options"), is_stream)
    fields.ignore("user", "metadata", "safety_identifier", "prompt_cache_key")
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
    fields.close()
    return Call(model, params, n, is_stream, wants_usage)


def _stream_options(value: object, is_stream: bool) -> bool:
    if value is None:
        return False
    if not is_stream:
        raise RequestError("stream_options needs stream", where="stream_options")
    if not isinstance(value, dict):
        raise RequestError("stream_options must be an object", where="stream_options")
    fields = Fields(value)
    wants = fields.flag("include_usage")
    fields.only("include_obfuscation", False)
    fields.close()
    return wants


def _guide(response_format: object, regex: str | None, forced: Guide | None) -> Guide | None:
    """`response_format` as OpenAI has it; `regex` is an extension; `forced` is a tool's call."""
    if forced is not None:
        if regex is not None or response_format not in (None, {"type": "text"}):
            raise RequestError("a forced tool call has a form already", where="tool_choice")
        return forced
    if regex is not None:
        if response_format is not None:
            raise RequestError("regex and response_format exclude each other", where="regex")
        return Guide("regex", regex)
    if response_format is None:
        return None
    where = "response_format"
    if not isinstance(response_format, dict):
        raise RequestError("response_format must be an object", where=where)
    fields = Fields(response_format)
    kind, holder = fields.text("type"), fields.any("json_schema")
    fields.close()
    if kind == "text" and holder is None:
        return None
    if kind == "json_object" and holder is None:
        return Guide("json", '{"type": "object"}')
    if kind != "json_schema" or not isinstance(holder, dict):
        raise RequestError("response_format must be text, json_object or json_schema", where=where)
    schema = holder.get("schema")
    if not isinstance(schema, dict):
        raise RequestError("response_format.json_schema.schema must be an object", where=where)
    return Guide("json", json.dumps(schema))


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    try:
        pairs = tuple((int(k), float(v)) for k, v in value.items())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        raise RequestError("logit_bias must map token ids to numbers", where="logit_bias") from None
    if not all(-100 <= bias <= 100 for _, bias in pairs):
        raise RequestError("logit_bias values must be in [-100, 100]", where="logit_bias")
    return pairs


def _prompts(value: object) -> tuple[str | list[int], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if is_ids(value):
            return (value,)
        if all(isinstance(v, str) or (is_ids(v) and v) for v in value):
            if len(value) > MAX_PROMPTS:
                raise RequestError(f"prompt holds more than {MAX_PROMPTS} prompts", where="prompt")
            return tuple(value)
    raise RequestError(
        "prompt must be a string, a list of strings, or token ids, and not empty", where="prompt"
    )


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message", where="messages")
    messages = []
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} must be an object with a role", where="messages")
        whole = {**message, "content": _content(message.get("content"), where)}
        if message.get("tool_calls") is not None:
            whole["tool_calls"] = _earlier_calls(message["tool_calls"], where)
        messages.append(whole)
    return messages


def _earlier_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Calls of earlier turns; templates want their arguments as an object, clients send text."""
    out = []
    try:
        for call in calls:  # type: ignore[attr-defined]
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
            out.append({**call, "function": function})
    except (TypeError, KeyError, ValueError, RecursionError):
        raise RequestError(f"{where}: tool_calls cannot be read", where="messages") from None
    return out


def _content(content: object, where: str) -> str:
    """The text of a message: a string, or parts that are all text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [None]:
        entry = part if isinstance(part, dict) else {}
        text = entry.get("text")
        if entry.get("type") != "text" or not isinstance(text, str):
            raise RequestError(f"{where}: only text content is supported", where="messages")
        parts.append(text)
    return "".join(parts)


# Answers


def finish_name(reason: FinishReason | None) -> str | None:
    """OpenAI knows no cancelled answers: what was cut short by the server ends as `length`."""
    if reason is None:
        return None
    return "length" if reason is FinishReason.CANCELLED else reason.value


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_name(reason),
    }


def completion_logprobs(
    items: Sequence[TokenLogprob], token_text: TokenText, offset: int
) -> dict[str, Any]:
    """The older logprobs shape: parallel lists, alternatives as a mapping by text."""
    tokens = [token_text(item.token_id) for item in items]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{token_text(t): p for t, p in item.top} for item in items],
        "text_offset": offsets,
    }


def chat_logprobs(items: Sequence[TokenLogprob], token_text: TokenText) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **entry(item.token_id, item.logprob),
                "top_logprobs": [entry(t, p) for t, p in item.top],
            }
            for item in items
        ],
        "refusal": None,
    }


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
