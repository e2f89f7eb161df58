"""What the step thread tells a request's owner. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from nagara.engine.errors import EngineError
from nagara.engine.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token, the end, or both."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    is_end_token: bool = False  # it ends the answer and has no text
    error: EngineError | None = None


Receiver = Callable[[TokenEvent], None]  # called on the step thread; must not block
