"""Many prompts to their whole answers, for a thread that has nothing else to do meanwhile."""

from collections import deque
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

from nagara.engine.answer import AnswerBuilder, merge
from nagara.engine.errors import OverloadedError
from nagara.engine.events import Receiver
from nagara.engine.mailbox import Letterbox
from nagara.engine.progress import Progress
from nagara.engine.request import Output, SamplingParams
from nagara.engine.tokenizer import Tokenizer


class Submits(Protocol):
    """The engine, as far as it is needed here."""

    def submit(self, prompt: Items[int], params: SamplingParams, receiver: Receiver) -> int: ...

    def cancel(self, key: int) -> None: ...


def generate_all(
    engine: Submits,
    tokenizer: Tokenizer,
    letters: Letterbox,
    all_ids: Items[list[int]],
    params: SamplingParams,
    show: Progress,
) -> list[Output]:
    """The answers in the prompts' order. Leaving early cancels what is still computed.

    Raises:
        OverloadedError: others hold every place of the engine.
        EngineError: the engine failed.
    """
    builders = [AnswerBuilder(tokenizer, params, len(ids)) for ids in all_ids]
    pieces: list[list[Output]] = [[] for _ in all_ids]
    waiting = deque(enumerate(all_ids))
    keys: dict[int, int] = {}  # of those computed: number → key
    ended = 0
    try:
        while ended < len(all_ids):
            _submit_some(engine, letters, waiting, keys, params)
            for number, event in letters.take():
                if number not in keys:
                    continue
                pieces[number].append(builders[number].take(event))
                if builders[number].finish_reason is not None:
                    engine.cancel(keys.pop(number))
                    ended += 1
                    show(ended, len(all_ids))
    finally:
        for key in keys.values():
            engine.cancel(key)
    return [merge(some) for some in pieces]


def _submit_some(
    engine: Submits,
    letters: Letterbox,
    waiting: deque[tuple[int, list[int]]],
    keys: dict[int, int],
    params: SamplingParams,
) -> None:
    """Submit as many of those that wait as the engine takes; more when some have ended."""
    while waiting:
        number, ids = waiting[0]
        try:
            keys[number] = engine.submit(ids, params, partial(letters.post, number))
        except OverloadedError:
            if not keys:
                raise  # others hold every place
            return
        waiting.popleft()
