"""`nagara.App`: an app as a Python value that can be deployed, asked about and deleted.

Blocking, for programs and notebooks. Its keywords are the keys of an app file; what is wrong with
them is found before anything is sent.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nagara.base.errors import UsageError
from nagara.control.appfile import parse_apps
from nagara.control.client import ControlClient, connect
from nagara.control.state_folder import default_state

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class App:
    """One app.

    Args:
        name: as in `[app.NAME]`.
        state: the state folder of the nagara to use; by default the one the commands use.
        keys: the keys of the app file, with tables as dictionaries.

    Raises:
        AppFileError: with every fault of the keys.
    """

    def __init__(self, name: str, *, state: Path | str | None = None, **keys: Any) -> None:
        self.name = name
        self._state = _state_folder(state)
        self._text = to_toml(name, keys)
        parse_apps(self._text, f"nagara.App({name!r})")

    def deploy(self) -> int:
        """Adds a version of the app, or the app itself; its number.

        Raises:
            NotRunningError: no nagara answers.
            NotAuthorisedError: its admin token may not be read.
            NagaraError: it cannot be deployed there, such as for want of a model.
        """
        (document,) = self._client().deploy(self._text, f"nagara.App({self.name!r})")
        version: int = document["version"]
        return version

    def status(self) -> dict[str, Any]:
        """What `GET /api/apps/NAME` answers. Raises `UnknownAppError` if it is not deployed."""
        return self._client().app(self.name)

    def rollback(self, to: int | None = None) -> int:
        """Takes an earlier version into use again; its number."""
        version: int = self._client().rollback(self.name, to)["version"]
        return version

    def delete(self) -> None:
        """Ends the app and removes what is kept of it. Raises `UnknownAppError`."""
        self._client().delete(self.name)

    @property
    def url(self) -> str:
        """Where requests reach it; they need an API key."""
        return f"{self._client().url}/{self.name}"

    def _client(self) -> ControlClient:
        return connect(self._state)


def to_toml(name: str, keys: Mapping[str, Any]) -> str:
    """An app file with one app."""
    lines = [f"[app.{_key(name)}]"]
    lines += [f"{_key(key)} = {_value(value, key)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _key(text: str) -> str:
    return text if _BARE_KEY.fullmatch(text) else _string(text)


def _value(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{_key(str(key))} = {_value(one, where)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_value(one, where) for one in value)}]"
    raise UsageError(f"a {type(value).__name__} cannot stand in an app file", where=where)


def _string(text: str) -> str:
    # JSON's escapes are TOML's too, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _state_folder(given: Path | str | None) -> Path:
    if given is not None:
        return Path(given)
    named = os.environ.get("NAGARA_STATE")
    return Path(named) if named else default_state(os.environ, os.geteuid())
