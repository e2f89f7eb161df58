"""Where a login goes, and what a registry may do to who asks it."""

import io
from pathlib import Path
from typing import Any

import pytest

from nagara.image import registry
from nagara.image.errors import BadArchiveError, SourceError
from nagara.image.registry import Credentials, Registry, parse_reference
from nagara.store.retrying import RetryPolicy

Script = dict[str, tuple[int, dict[str, str], bytes]]  # url → status, headers, body


class Answer(io.BytesIO):
    """One of a script's answers."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(body)
        self.status, self.headers = status, headers


class Web:
    """Servers that answer from a script; notes who was sent an Authorization."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.logins: dict[str, str] = {}

    def connect(self, parts: Any) -> Any:
        web, place = self, f"{parts.scheme}://{parts.netloc}"

        class Connection:
            def request(self, method: str, target: str, headers: dict[str, str]) -> None:
                self.url = f"{place}{target}".partition("?")[0]
                if "Authorization" in headers:
                    web.logins[self.url] = headers["Authorization"].partition(" ")[0]
                self.headers = headers

            def getresponse(self) -> Answer:
                status, headers, body = web.script[self.url]
                if status == 401 and "Authorization" in self.headers:
                    status = 200
                return Answer(status, headers, body)

            def close(self) -> None:
                pass

        return Connection()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    made = Web({})
    monkeypatch.setattr(registry, "_connect", made.connect)
    return made


def client(tmp_path: Path) -> Registry:
    return Registry(
        parse_reference("host.example/team/app:v1"), tmp_path,
        credentials=Credentials("user", "secret"), retries=RetryPolicy(attempts=1),
    )  # fmt: skip


MANIFEST = "https://host.example/v2/team/app/manifests/v1"


def wants(realm: str) -> dict[str, str]:
    return {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'}


@pytest.mark.parametrize("there", ["http://host.example/m", "https://other.example/m"])
def test_a_login_follows_no_redirect_to_elsewhere_nor_into_the_clear(
    web: Web, tmp_path: Path, there: str
) -> None:
    web.script = {
        MANIFEST: (401, {**wants("https://token.example/t"), "Location": there}, b"{}"),
        "https://token.example/t": (200, {}, b'{"token": "good"}'),
        there: (200, {}, b"{}"),
    }
    real = web.connect

    def redirecting(parts: Any) -> Any:
        connection = real(parts)
        answer = connection.getresponse

        def moved() -> Answer:
            found: Answer = answer()
            if connection.url == MANIFEST and found.status == 200:
                found.status = 307
            return found

        connection.getresponse = moved
        return connection

    registry._connect = redirecting  # type: ignore[assignment]
    client(tmp_path).manifest()
    assert web.logins == {"https://token.example/t": "Basic", MANIFEST: "Bearer"}


def test_a_login_is_not_sent_to_a_token_server_in_the_clear(web: Web, tmp_path: Path) -> None:
    web.script = {MANIFEST: (401, wants("http://token.example/t"), b"{}")}
    with pytest.raises(SourceError, match="in the clear"):
        client(tmp_path).manifest()
    assert web.logins == {}


@pytest.mark.parametrize("after", ["²", "soon", "5", "Mon, 01 Jan 0001 00:00:00 -0000", ""])
def test_a_busy_registry_is_one_that_cannot_be_reached(
    web: Web, tmp_path: Path, after: str
) -> None:
    web.script = {MANIFEST: (503, {"Retry-After": after}, b"busy")}
    with pytest.raises(SourceError, match="503 busy"):
        client(tmp_path).manifest()


@pytest.mark.parametrize("size", ["5", None, -1, 1.5, [], True])
def test_a_descriptor_without_a_size_is_refused(tmp_path: Path, size: Any) -> None:
    descriptor = {"digest": "sha256:" + "0" * 64, "size": size}
    with pytest.raises(BadArchiveError), client(tmp_path).open_blob(descriptor):
        pass
