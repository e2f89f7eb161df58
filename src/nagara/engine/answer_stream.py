"""One request's answer as it grows, for an asyncio loop. The request runs from the beginning on."""

import asyncio
from collections.abc import Callable
from typing import Self

from nagara.engine.answer import AnswerBuilder
from nagara.engine.events import TokenEvent
from nagara.engine.request import Output


class AnswerStream:
    """An asynchronous iterator of pieces; whoever stops listening cancels the request.

    Args:
        letters: what the step thread says of the request.
        cancel: ends the request; called once, also when it has ended by itself.
    """

    def __init__(
        self,
        letters: asyncio.Queue[TokenEvent],
        builder: AnswerBuilder,
        cancel: Callable[[], None],
    ) -> None:
        self._letters = letters
        self._builder = builder
        self._cancel: Callable[[], None] | None = cancel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """Raises EngineError when the engine, or something of the request's own, failed."""
        try:
            while self._cancel is not None and self._builder.finish_reason is None:
                piece = self._builder.take(await self._letters.get())
                if piece.text or piece.token_ids or piece.finish_reason is not None:
                    return piece
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopAsyncIteration

    def close(self) -> None:
        """End the request, if it has not ended."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    async def aclose(self) -> None:
        """The same, as `contextlib.aclosing` wants it."""
        self.close()

    def __del__(self) -> None:
        self.close()
