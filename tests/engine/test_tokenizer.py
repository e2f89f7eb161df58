"""Texts are tokenized without keeping the step loop from the interpreter."""

import threading

from nagara.engine.tokenizer import LONG_TEXT, Tokenizer


def test_other_threads_go_on_while_a_long_text_is_tokenized(smollm2):
    """One call of the library, during which this thread makes many turns of Python."""
    tokenizer = Tokenizer(smollm2)
    text = "the quick brown fox jumps over the lazy dog " * 20_000
    at: dict[str, int] = {}
    turns = 0
    inner = tokenizer._tokenizer

    class Watched:
        def encode_batch(self, *args, **kwargs):
            at["begin"] = turns
            out = inner.encode_batch(*args, **kwargs)
            at["end"] = turns
            return out

    tokenizer._tokenizer = Watched()
    ids: list[list[int]] = []
    thread = threading.Thread(target=lambda: ids.append(tokenizer.encode(text)))
    thread.start()
    while thread.is_alive():
        turns += 1
    assert len(ids[0]) > 100_000
    # With the lock held throughout it would be at most the turns of one switch interval
    assert at["end"] - at["begin"] > 100_000


def test_texts_of_every_length_get_the_tokens_that_the_library_gives(tiny):
    tokenizer = Tokenizer(tiny)
    long = "the quick žluťoučký kůň 🐎 " * 50
    assert len(long) > LONG_TEXT
    for text in ("", "the quick brown fox", long):
        for special in (True, False):
            expected = tokenizer._tokenizer.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special=special) == expected
