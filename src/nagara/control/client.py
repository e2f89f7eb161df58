"""Talks to a running control process from the command line. Synchronous, standard library only.

It finds the process by `control.json` and `admin.token` in the state folder.
"""

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from nagara.base.errors import NagaraError, UsageError
from nagara.control.auth import TOKEN_FILE
from nagara.control.errors import (
    ControlError,
    NotAuthorisedError,
    NotRunningError,
    UnknownAppError,
)

CONTROL_FILE = "control.json"
_POLL_S = 0.2
_DEPLOY_S = 24 * 3600.0  # images may be large and far; `status` tells how far they are


class ControlClient:
    """One control process's admin API.

    Args:
        url: `http://HOST:PORT`.
        token: the admin token.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 700.0) -> None:
        self.url = url
        self._token = token
        self._timeout_s = timeout_s

    def status(self) -> dict[str, Any]:
        """The node's facts."""
        return self._call("GET", "/api/status")

    def deploy(self, text: str, file: str) -> list[dict[str, Any]]:
        """Deploys the apps of an app file's text; `file` names it in messages."""
        query = urlencode({"file": file})
        patient = ControlClient(self.url, self._token, timeout_s=_DEPLOY_S)
        answer = patient._call("PUT", f"/api/apps?{query}", text.encode())
        apps: list[dict[str, Any]] = answer["apps"]
        return apps

    def apps(self) -> list[dict[str, Any]]:
        """All deployed apps."""
        apps: list[dict[str, Any]] = self._call("GET", "/api/apps")["apps"]
        return apps

    def app(self, name: str) -> dict[str, Any]:
        """One deployed app."""
        return self._call("GET", f"/api/apps/{quote(name, safe='')}")

    def delete(self, name: str) -> None:
        """Deletes an app; returns when its replicas have ended."""
        self._call("DELETE", f"/api/apps/{quote(name, safe='')}")

    def fold(self, name: str) -> int:
        """Ends an app's present replicas; returns their number when they have ended."""
        folded: int = self._call("POST", f"/api/apps/{quote(name, safe='')}/fold")["folded"]
        return folded

    def trace(self, name: str) -> dict[str, Any]:
        """The starts of an app or of one replica, newest first."""
        return self._call("GET", f"/api/trace/{quote(name, safe='')}")

    def logs(
        self, app: str, *, replica: str | None = None, tail_bytes: int = 65536
    ) -> tuple[str, bytes]:
        """(replica, the end of its log)."""
        query = {"tail_bytes": str(tail_bytes), **({"replica": replica} if replica else {})}
        path = f"/api/apps/{quote(app, safe='')}/logs?{urlencode(query)}"
        headers, body = self._exchange("GET", path, None)
        return headers.get("x-nagara-replica", ""), body

    def keys(self) -> list[dict[str, Any]]:
        """The API keys, without their texts."""
        keys: list[dict[str, Any]] = self._call("GET", "/api/keys")["keys"]
        return keys

    def add_key(self, name: str) -> str:
        """Makes an API key and returns its text."""
        key: str = self._call("POST", f"/api/keys?{urlencode({'name': name})}")["key"]
        return key

    def events(self) -> Iterator[tuple[str, Any]]:
        """(name, document) of each server-sent event, for as long as nagara runs."""
        connection, answer = self._begin("GET", "/api/events", None)
        try:
            if answer.status >= 400:
                raise _to_error(answer.status, answer.read(), self.url)
            name = ""
            for line in answer:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])
        except (OSError, http.client.HTTPException) as error:
            raise _silent(error, self.url) from error
        finally:
            connection.close()

    def replicas(self, app: str) -> list[dict[str, Any]]:
        """An app's latest replicas, living and ended."""
        path = f"/api/apps/{quote(app, safe='')}/replicas"
        replicas: list[dict[str, Any]] = self._call("GET", path)["replicas"]
        return replicas

    def versions(self, app: str) -> list[dict[str, Any]]:
        """The app's versions, newest first."""
        path = f"/api/apps/{quote(app, safe='')}/versions"
        versions: list[dict[str, Any]] = self._call("GET", path)["versions"]
        return versions

    def rollback(self, app: str, to: int | None = None) -> dict[str, Any]:
        """Takes an earlier version into use again; the app after it."""
        query = "" if to is None else f"?to={to}"
        return self._call("POST", f"/api/apps/{quote(app, safe='')}/rollback{query}")

    def usage(self) -> dict[str, Any]:
        """What reserved slots were used for."""
        return self._call("GET", "/api/usage")

    def disk(self) -> dict[str, Any]:
        """What the machine keeps on its disk, by part, and its bound. Bytes."""
        return self._call("GET", "/api/disk")

    def metrics(self) -> str:
        """All figures in Prometheus's text format."""
        return self._exchange("GET", "/metrics", None)[1].decode()

    def pool(self) -> dict[str, Any]:
        """The pool: its machines, its figures."""
        return self._call("GET", "/api/pool")

    def pool_plan(self) -> dict[str, Any]:
        """The pool's latest plan, explained."""
        return self._call("GET", "/api/pool/plan")

    def order_machine(self, name: str, what: str) -> dict[str, Any]:
        """`drain`, `resume`, or `diagnose?kind=KIND`; the machine's state after it."""
        return self._call("POST", f"/api/pool/machines/{quote(name, safe='')}/{what}")

    def wait_for_capture(self, app: str, *, timeout_s: float) -> dict[str, Any]:
        """Waits until the app's snapshot is made or given up; returns its `capture` document.

        Raises:
            ControlError: neither happened in time.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            capture: dict[str, Any] = self.app(app)["capture"]
            if capture["state"] in ("done", "off"):
                return capture
            if time.monotonic() > end_s:
                raise ControlError(
                    f"no snapshot of {app!r} after {timeout_s:g} s (it is {capture['state']})"
                )
            time.sleep(_POLL_S)

    def _call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        _, answer = self._exchange(method, path, body)
        document: dict[str, Any] = json.loads(answer)
        return document

    def _exchange(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPMessage, bytes]:
        connection, answer = self._begin(method, path, body)
        try:
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise _silent(error, self.url) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise _to_error(answer.status, content, self.url)
        return answer.headers, content

    def _begin(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Asks; the answer's head is here, its body is not. The caller closes the connection."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=self._timeout_s
        )
        try:
            headers = {"Authorization": f"Bearer {self._token}"}
            connection.request(method, path, body=body, headers=headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _silent(error, self.url) from error


def _silent(error: Exception, url: str) -> NotRunningError:
    return NotRunningError(
        f"the control process does not answer ({error})", where=url,
        hint="is it still running? start it with: nagara up",
    )  # fmt: skip


def connect(state: Path) -> ControlClient:
    """The client of the control process that uses the state folder.

    Raises:
        NotRunningError: there is none.
        NotAuthorisedError: this user may not read its token.
    """
    try:
        url = json.loads((state / CONTROL_FILE).read_text())["url"]
        token = (state / TOKEN_FILE).read_text().strip()
    except FileNotFoundError as error:
        raise NotRunningError(
            "nagara is not running here", where=str(state),
            hint="start it with: nagara up (or name its folder with --state)",
        ) from error  # fmt: skip
    except PermissionError as error:
        raise NotAuthorisedError(
            "this user may not read the admin token", where=str(state),
            hint="run the command as the user who runs nagara up",
        ) from error  # fmt: skip
    return ControlClient(url, token)


def _to_error(status: int, content: bytes, url: str) -> NagaraError:
    try:
        error = json.loads(content)["error"]
        what, where, hint = error["message"], error.get("param"), error.get("hint")
    except (ValueError, KeyError, TypeError):
        what, where, hint = content.decode(errors="replace")[:2000], None, None
    if status == 401:
        return NotAuthorisedError(what, where=url)
    if status == 404:
        return UnknownAppError(what, hint="nagara apps lists what is deployed")
    if status == 400:
        return UsageError(what, where=where, hint=hint)
    return ControlError(what, where=where or url, hint=hint)
