"""Many prompts' whole answers, computed together, for whoever waits for all of them.

Called on the caller's thread; what the step thread tells comes through a letterbox.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from nagara.engine.answer import AnswerBuilder, merge
from nagara.engine.errors import OverloadedError
from nagara.engine.events import Receiver, TokenEvent
from nagara.engine.mailbox import Letterbox
from nagara.engine.progress import Progress, shown_progress
from nagara.engine.request import Output, SamplingParams
from nagara.engine.tokenizer import Tokenizer


class Computing(Protocol):
    """What a batch needs of an engine."""

    tokenizer: Tokenizer

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def submit(self, prompt: Sequence[int], params: SamplingParams, receiver: Receiver) -> int: ...

    def cancel(self, key: int) -> None: ...


class Batch:
    """Prompts that are answered once, in their order. `check`s all of them first.

    Args:
        letters: one that the engine flushes after each step.
    """

    def __init__(
        self,
        engine: Computing,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        letters: Letterbox,
    ) -> None:
        for prompt in prompts:
            engine.check(prompt, params)
        self._engine = engine
        self._params = params
        self._waiting = deque(enumerate(prompts))
        self._builders = [AnswerBuilder(engine.tokenizer, params, len(p)) for p in prompts]
        self._pieces: list[list[Output]] = [[] for _ in prompts]
        self._letters = letters
        self._keys: dict[int, int] = {}  # of those computed: index → key

    def run(self, progress: Progress | bool) -> list[Output]:
        """Raises EngineError when the engine fails or others hold every place of it."""
        count = len(self._builders)
        ended = 0
        try:
            with shown_progress(progress, count) as show:
                while ended < count:
                    self._submit_some()
                    for index, event in self._letters.take():
                        if self._take(index, event):
                            ended += 1
                            show(ended, count)
        finally:
            for key in self._keys.values():
                self._engine.cancel(key)
        return [merge(pieces) for pieces in self._pieces]

    def _submit_some(self) -> None:
        """Submits as many of those that wait as the engine takes; more when some have ended."""
        while self._waiting:
            index, prompt = self._waiting[0]
            try:
                receiver = partial(self._letters.post, index)
                self._keys[index] = self._engine.submit(prompt, self._params, receiver)
            except OverloadedError:
                if not self._keys:
                    raise  # others hold every place
                return
            self._waiting.popleft()

    def _take(self, index: int, event: TokenEvent) -> bool:
        """Adds what one answer's event brings; True when the answer has ended by it."""
        if index not in self._keys:
            return False
        builder = self._builders[index]
        self._pieces[index].append(builder.take(event))
        if builder.finish_reason is None:
            return False
        self._engine.cancel(self._keys.pop(index))
        return True
