"""OpenAI's request and answer shapes for completions and chat, as plain data.

Pure: bodies in, frozen calls out; pieces in, JSON-ready objects out. Field names follow
https://platform.openai.com/docs/api-reference; beyond them `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `ignore_eos` and `stop_token_ids` are understood.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nagara.engine.errors import RequestError
from nagara.engine.fields import Fields, is_ids
from nagara.engine.request import MAX_CHOICES, FinishReason, Output, SamplingParams, TokenLogprob

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for completions
MAX_PROMPTS = 128

TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Call:
    """What completions and chat have in common once parsed."""

    model: str
    params: SamplingParams
    n: int
    is_stream: bool
    wants_usage: bool  # a last chunk with the token counts, when streaming


@dataclass(frozen=True, slots=True)
class CompletionCall:
    call: Call
    prompts: tuple[str | list[int], ...]


@dataclass(frozen=True, slots=True)
class ChatCall:
    call: Call
    messages: list[dict[str, Any]]
    template_values: dict[str, Any]
    has_max_tokens: bool  # otherwise the answer may fill the context


def parse_completion(body: dict[str, Any]) -> CompletionCall:
    """Raises RequestError naming the parameter at fault."""
    fields = Fields(body)
    prompts = _prompts(fields.any("prompt"))
    logprobs = fields.integer("logprobs", -1)
    max_tokens = fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS)
    fields.only("echo", False)
    fields.only("suffix", "")
    n = fields.integer("n", 1)
    fields.only("best_of", n)
    call = _call(fields, max_tokens, None if logprobs < 0 else logprobs, n)
    return CompletionCall(call, prompts)


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
    fields.only("response_format", {"type": "text"})
    fields.only("tools", [])
    fields.only("tool_choice", "none", "auto")
    fields.only("functions", [])
    fields.only("modalities", ["text"])
    fields.only("parallel_tool_calls", True, False)
    values = fields.any("chat_template_kwargs") or {}
    if not isinstance(values, dict):
        raise RequestError("chat_template_kwargs must be an object", where="chat_template_kwargs")
    n = fields.integer("n", 1)
    call = _call(fields, max_tokens, alternatives if wants_logprobs else None, n)
    return ChatCall(call, messages, values, bool(given))


def _call(fields: Fields, max_tokens: int, logprobs: int | None, n: int) -> Call:
    model = fields.text("model") or ""
    if not model:
        raise RequestError("model is missing", where="model")
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
        messages.append({**message, "content": _content(message.get("content"), where)})
    return messages


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


def merge(pieces: Sequence[Output]) -> Output:
    """One whole answer out of its pieces."""
    last = pieces[-1]
    return Output(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(t for piece in pieces for t in piece.token_ids),
        logprobs=tuple(p for piece in pieces for p in piece.logprobs),
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        completion_tokens=last.completion_tokens,
    )


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
