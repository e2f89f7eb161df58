"""Text to tokens and back: the tokenizer, the chat template, and text that arrives in pieces.

Uses the `tokenizers` library and jinja2 directly: both load in a tenth of a second. Called by the
HTTP side only, never by the step loop.
"""

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import tokenizers

from nagara.engine.errors import ModelFolderError, RequestError
from nagara.engine.modelfolder import read_json_object

LONG_TEXT = 512  # characters: about half a millisecond
REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no whole character yet


class Tokenizer:
    """The tokenizer of one model folder.

    Raises:
        ModelFolderError: `tokenizer.json` or the chat template cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ModelFolderError(f"is no tokenizer: {error}", where=str(file)) from error
        settings_file = folder / "tokenizer_config.json"
        settings = read_json_object(settings_file) if settings_file.exists() else {}
        self._special = {
            key: _token_text(value)
            for key, value in settings.items()
            if key.endswith("_token") and _token_text(value) is not None
        }
        self._template = _compile_template(folder, settings)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The text's tokens. Long texts are tokenized without holding the interpreter's lock."""
        if len(text) < LONG_TEXT:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special)
        else:  # a batch of one: only the batch call releases the lock
            [encoded] = self._tokenizer.encode_batch([text], add_special_tokens=add_special)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones spelled out; bytes of a part character show as U+FFFD."""
        return self.decode([token_id], skip_special=False)

    def json_text(self) -> str:
        """The tokenizer as the JSON it was made of."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def eos_id(self) -> int | None:
        token = self._special.get("eos_token")
        return None if token is None else self.token_id(token)

    def chat_prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **extra: Any
    ) -> list[int]:
        """The tokens of a conversation, ready for the assistant's next turn.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "the model has no chat template", where="messages", hint="use /v1/completions"
            )
        values = {**self._special, **extra}
        try:
            text = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=True, **values
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", where="messages"
            ) from error
        return self.encode(text, add_special=False)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _compile_template(folder: Path, settings: dict[str, Any]) -> jinja2.Template | None:
    file = folder / "chat_template.jinja"
    source = settings.get("chat_template")
    if file.exists():
        source = file.read_text(encoding="utf-8")
    if isinstance(source, list):  # several named templates: the one called default is for chat
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (
        datetime.datetime.now(tz=datetime.UTC).astimezone().strftime(form)
    )
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFolderError(f"the chat template is broken: {error}", where=str(file)) from error


class TextBuilder:
    """Turns tokens into text piece by piece; a piece never ends inside a character.

    Two marks run along the tokens: `[context, shown)` are tokens whose text is out and which are
    decoded again as context of what follows, because the text of a token depends on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._fresh()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """What is still held back, incomplete characters shown as U+FFFD."""
        text = self._fresh()
        self._context = self._shown = len(self._ids)
        return text

    def _fresh(self) -> str:
        decode = self._tokenizer.decode
        known = decode(self._ids[self._context : self._shown], skip_special=self._skip_special)
        whole = decode(self._ids[self._context :], skip_special=self._skip_special)
        return whole[len(known) :]


class StopFinder:
    """Watches a growing text for stop strings and holds back what may become one.

    The earliest stop string in the text wins.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """Text that is safe to show; empty after the stop."""
        if self.is_found:
            return ""
        if not self._stops:
            return text
        self._held += text
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.is_found = True
            safe, self._held = self._held[: min(places)], ""
            return safe
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
