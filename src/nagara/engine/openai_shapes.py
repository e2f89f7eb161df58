"""Pieces of answers dressed as OpenAI's objects: whole ones and the chunks of a stream.

One shape object belongs to one HTTP request. Pure but for the request's id and time of creation.
"""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

from nagara.engine import openai_api as api
from nagara.engine.request import Output, SamplingParams
from nagara.engine.tokenizer import Tokenizer


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

    def use(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
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
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        logprobs = None
        offset = self._lengths.get(index, 0)
        if self._wants_logprobs:
            logprobs = api.completion_logprobs(output.logprobs, self._token_text, offset)
        self._lengths[index] = offset + len(output.text)
        return api.completion_choice(index, output.text, logprobs, output.finish_reason)

    def chunks(self, index: int, piece: Output) -> list[dict[str, Any]]:
        self.count(index, piece)
        return [{**self.head(self.chunk_kind), "choices": [self.choice(index, piece)]}]


class ChatShape(Shape):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": api.finish_name(output.finish_reason),
        }

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return api.chat_logprobs(output.logprobs, self._token_text)

    def chunks(self, index: int, piece: Output) -> list[dict[str, Any]]:
        """The first piece of a choice is preceded by its role, the last has the finish reason."""
        deltas: list[tuple[dict[str, Any], Output | None]] = []
        if index not in self._counts:
            deltas.append(({"role": "assistant", "content": ""}, None))
        self.count(index, piece)
        deltas.append(({"content": piece.text} if piece.text else {}, piece))
        return [
            {
                **self.head(self.chunk_kind),
                "choices": [
                    {
                        "index": index,
                        "delta": delta,
                        "logprobs": None if part is None else self._logprobs(part),
                        "finish_reason": None
                        if part is None
                        else api.finish_name(part.finish_reason),
                    }
                ],
            }
            for delta, part in deltas
        ]
