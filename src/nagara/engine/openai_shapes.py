"""Pieces of answers dressed as OpenAI's objects: whole ones and the chunks of a stream.

One shape object belongs to one HTTP request. Pure but for the request's id and time of creation.
"""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

from nagara.engine import openai_api as api
from nagara.engine.request import FinishReason, Output, SamplingParams
from nagara.engine.tokenizer import Tokenizer
from nagara.engine.tools import Parsed, ToolCallParser


class Shape(abc.ABC):
    """Dresses pieces of answers as one of OpenAI's objects."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, model: str) -> None:
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._counts: dict[int, tuple[int, int]] = {}
        self._lengths: dict[int, int] = {}

    def use(self, tokenizer: Tokenizer, params: SamplingParams, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._token_text = tokenizer.token_text
        self._wants_logprobs = params.logprobs is not None

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def count(self, index: int, piece: Output) -> None:
        self._counts[index] = (piece.prompt_tokens, piece.completion_tokens)

    def usage(self, n: int) -> dict[str, int]:
        """Each prompt counts once, however many choices it has."""
        prompt = sum(self._counts[i][0] for i in range(0, len(self._counts), n))
        return api.usage(prompt, sum(made for _, made in self._counts.values()))

    def usage_chunk(self, n: int) -> dict[str, Any]:
        return {**self.head(self.chunk_kind), "choices": [], "usage": self.usage(n)}

    def whole(self, outputs: Sequence[Output], n: int) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            self.count(index, output)
            choices.append(self.choice(index, output))
        return {**self.head(self.kind), "choices": choices, "usage": self.usage(n)}

    @abc.abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]: ...

    @abc.abstractmethod
    def chunks(self, index: int, piece: Output) -> list[dict[str, Any]]: ...


class CompletionShape(Shape):
    """Completions; with `echo` each answer's text begins with its prompt's."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, echo: Sequence[str] = (), choices: int = 1) -> None:
        super().__init__(model)
        self._echo, self._choices = echo, choices

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        logprobs = None
        offset = self._lengths.get(index, 0)
        if self._wants_logprobs:
            logprobs = api.completion_logprobs(output.logprobs, self._token_text, offset)
        text = output.text
        if self._echo and index not in self._lengths:
            text = self._echo[index // self._choices] + text
        self._lengths[index] = offset + len(text)
        return api.completion_choice(index, text, logprobs, output.finish_reason)

    def chunks(self, index: int, piece: Output) -> list[dict[str, Any]]:
        self.count(index, piece)
        return [{**self.head(self.chunk_kind), "choices": [self.choice(index, piece)]}]


class ChatShape(Shape):
    """Chat answers; where tools were offered, calls are taken out of the text."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._parsers: dict[int, ToolCallParser] = {}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        parsed = self._parse(index, output)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parsed.text or (None if parsed.calls else ""),
            "refusal": None,
        }
        if parsed.calls:
            message["tool_calls"] = self._calls(parsed, 0, is_delta=False)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._reason(index, output),
        }

    def chunks(self, index: int, piece: Output) -> list[dict[str, Any]]:
        """The first piece of a choice is preceded by its role, the last has the finish reason."""
        out = []
        if index not in self._counts:
            out.append(self._chunk(index, {"role": "assistant", "content": ""}, None, None))
        self.count(index, piece)
        before = self._parsers[index].found if index in self._parsers else 0
        parsed = self._parse(index, piece)
        delta: dict[str, Any] = {}
        if parsed.text:
            delta["content"] = parsed.text
        if parsed.calls:
            delta["tool_calls"] = self._calls(parsed, before, is_delta=True)
        reason = self._reason(index, piece)
        out.append(self._chunk(index, delta, self._logprobs(piece), reason))
        return out

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head(self.chunk_kind), "choices": [choice]}

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return api.chat_logprobs(output.logprobs, self._token_text)

    def _parse(self, index: int, piece: Output) -> Parsed:
        if not self._has_tools:
            return Parsed(piece.text)
        parser = self._parsers.setdefault(index, ToolCallParser())
        parsed = parser.push(piece.text)
        if piece.finish_reason is None:
            return parsed
        return Parsed(parsed.text + parser.finish().text, parsed.calls)

    def _calls(self, parsed: Parsed, first: int, *, is_delta: bool) -> list[dict[str, Any]]:
        return [
            {
                **({"index": first + i} if is_delta else {}),
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(parsed.calls)
        ]

    def _reason(self, index: int, output: Output) -> str | None:
        is_stop = output.finish_reason is FinishReason.STOP
        if is_stop and index in self._parsers and self._parsers[index].found:
            return "tool_calls"
        return api.finish_name(output.finish_reason)
