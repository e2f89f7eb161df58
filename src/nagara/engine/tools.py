"""Tool calls in the text of an answer: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The form that Hermes and Qwen models are trained on. Pure; works on text that arrives in pieces:
what may be the beginning of a call is held back, and what turns out to be none is given out as
text unchanged.
"""

import json
from dataclasses import dataclass, field

from nagara.engine.tokenizer import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON text, as OpenAI's clients expect it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text turned out to hold."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class ToolCallParser:
    """Splits one answer into text and calls."""

    _held: str = ""
    _count: int = 0
    _last_was_call: bool = field(default=False)

    @property
    def found(self) -> int:
        return self._count

    def push(self, text: str) -> Parsed:
        self._held += text
        out, calls = "", []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = overlap(self._held, OPEN)
                cut = len(self._held) - keep
                out += self._plain(self._held[:cut])
                self._held = self._held[cut:]
                break
            end = self._held.find(CLOSE, start)
            out += self._plain(self._held[:start])
            self._held = self._held[start:]
            if end < 0:
                break
            end += len(CLOSE) - start
            call = _parse(self._held[len(OPEN) : end - len(CLOSE)])
            if call is None:
                out += self._held[:end]
            else:
                calls.append(call)
                self._count += 1
                self._last_was_call = True
            self._held = self._held[end:]
        return Parsed(out, tuple(calls))

    def finish(self) -> Parsed:
        """The end of the answer: a call that was never closed is text."""
        held, self._held = self._held, ""
        return Parsed(self._plain(held))

    def _plain(self, text: str) -> str:
        """Text between calls; the line breaks that separate calls are no text."""
        if self._last_was_call and not text.strip():
            return ""
        if text:
            self._last_was_call = False
        return text


def _parse(raw: str) -> ToolCall | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):  # a model may write any number of digits or brackets
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], arguments)
