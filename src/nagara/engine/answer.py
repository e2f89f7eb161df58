"""One answer as it grows: tokens in, pieces of text with their ids and log probabilities out.

Text, ids and log probabilities are trimmed together: a token is handed out when all of its text is,
and a token whose text lies behind a stop string is never handed out. End tokens have no text; they
are counted, not shown. Runs on the receiving side, never on the step thread.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from nagara.engine.events import TokenEvent
from nagara.engine.request import FinishReason, Output, SamplingParams, TokenLogprob
from nagara.engine.tokenizer import StopFinder, TextBuilder, Tokenizer


@dataclass(frozen=True, slots=True)
class _Held:
    """A token not handed out yet; its text is at `[start, end)` of the whole answer."""

    token_id: int
    logprob: TokenLogprob | None
    start: int
    end: int


class AnswerBuilder:
    """Builds one choice of one request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_tokens: int) -> None:
        self._text = TextBuilder(tokenizer)
        self._stops = StopFinder(params.stop)
        self._params = params
        self._held: deque[_Held] = deque()
        self._prompt_tokens = prompt_tokens
        self._counted = 0
        self._made = 0  # characters decoded
        self._shown = 0  # characters handed out
        self.finish_reason: FinishReason | None = None

    def take(self, event: TokenEvent) -> Output:
        """Add what the event brings and return what may be shown now.

        After a piece with a finish reason nothing more may be added.

        Raises:
            EngineError: the event carries one.
        """
        if event.error is not None:
            raise event.error
        text = ""
        finish_reason = event.finish_reason
        if event.token_id is not None:
            self._counted += 1
            if not event.is_end_token:
                text = self._add(event.token_id, event.logprob)
        if finish_reason is not None and not self._stops.is_found:
            text += self._stops.push(self._grow(self._text.finish()))
        if self._stops.is_found:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += self._stops.finish()
        self.finish_reason = finish_reason
        return self._piece(text)

    def _add(self, token_id: int, logprob: TokenLogprob | None) -> str:
        start = self._made
        fresh = self._grow(self._text.push(token_id))
        self._held.append(_Held(token_id, logprob, start, self._made))
        return self._stops.push(fresh)

    def _grow(self, fresh: str) -> str:
        self._made += len(fresh)
        return fresh

    def _piece(self, text: str) -> Output:
        self._shown += len(text)
        is_over = self.finish_reason is not None
        out: list[_Held] = []
        while self._held:
            held = self._held[0]
            is_incomplete = held.start == held.end == self._made  # part of a character
            if not is_over and (held.end > self._shown or is_incomplete):
                break
            if is_over and self._stops.is_found and held.start >= self._shown:
                break
            out.append(self._held.popleft())
        return Output(
            text=text,
            token_ids=tuple(held.token_id for held in out),
            logprobs=tuple(held.logprob for held in out if held.logprob is not None),
            finish_reason=self.finish_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._counted,
        )


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
