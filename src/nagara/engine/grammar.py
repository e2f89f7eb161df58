"""Structured output: which tokens a JSON schema or a regular expression allows next.

Uses llguidance, an optional dependency. Grammars are built by whoever submits, followed by the
step thread. The library's matcher works on bytes, so every tokenizer that spells its tokens works.
"""

import threading
from typing import Any

import torch

from nagara.engine.errors import RequestError, UnsupportedError
from nagara.engine.request import Guide
from nagara.engine.tokenizer import Tokenizer


class GrammarState:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def allowed(self) -> torch.Tensor:
        """Bool `[vocab]`: tokens that keep the text on its way to a match; end tokens at one."""
        raw = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (raw[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        mask = torch.zeros(self._vocab, dtype=torch.bool)
        flat = bits.flatten()[: self._vocab].bool()
        mask[: len(flat)] = flat
        return mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


class GrammarMaker:
    """Builds grammars over one tokenizer, whose table is made at the first use."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab, self._end_ids = tokenizer, vocab, end_ids
        self._lock = threading.Lock()
        self._table: Any = None

    def make(self, guide: Guide) -> GrammarState:
        """Raises RequestError if the schema or expression is invalid or asks for too much."""
        llguidance = _library()
        with self._lock:
            if self._table is None:
                self._table = llguidance.LLTokenizer(
                    self._tokenizer.json_text(), n_vocab=self._vocab, eos_token=list(self._end_ids)
                )
        where = {"json": "response_format", "regex": "regex", "lark": "tools"}[guide.kind]
        try:
            if guide.kind == "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(guide.source)
            elif guide.kind == "lark":
                grammar = llguidance.LLMatcher.grammar_from_lark(guide.source)
            else:
                grammar = llguidance.LLMatcher.grammar_from_regex(guide.source)
            matcher = llguidance.LLMatcher(self._table, grammar)
        except (ValueError, TypeError) as error:
            raise RequestError(f"the form cannot be used: {error}", where=where) from error
        if matcher.is_error():
            raise RequestError(f"the form cannot be used: {matcher.get_error()}", where=where)
        return GrammarState(matcher, self._vocab)


def _library() -> Any:
    try:
        import llguidance  # optional: only structured output needs it
    except ImportError as error:
        raise UnsupportedError(
            "structured output needs the library llguidance",
            where="response_format",
            hint="pip install llguidance",
        ) from error
    return llguidance
