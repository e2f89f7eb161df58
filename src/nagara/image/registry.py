"""Images from a registry: the OCI distribution API with bearer and basic auth, and mirrors.

Specification: OCI distribution-spec 1.1; tokens as the Docker registry describes them. Blobs are
brought to the disk first, with retries that go on where the last one broke off, and checked;
then they are read as a layout's are. Blocking; belongs to one thread.
"""

import base64
import contextlib
import functools
import http.client
import ipaddress
import re
import ssl
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nagara.base.errors import UsageError
from nagara.image.compression import HashedStream
from nagara.image.errors import BadArchiveError, SourceError
from nagara.image.oci import (
    ACCEPTED,
    DOCUMENT_LIMIT_BYTES,
    check_digest,
    choose,
    is_index,
    parse_document,
)
from nagara.store.documents import parse_json
from nagara.store.errors import UnavailableError
from nagara.store.http_tier import seconds_of
from nagara.store.retrying import RefusedError, RetryPolicy
from nagara.store.timed_response import TimedResponse

_REFERENCE = re.compile(
    r"(?P<host>[a-zA-Z0-9.-]+(:\d{1,5})?|\[[0-9a-f:]+\](:\d{1,5})?)/"
    r"(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S = 30.0
_ANSWER_S = 3600.0  # of one answer, a layer's whole content
_WHOLE_S = 3600.0
_REDIRECTS = 5
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Reference:
    """Which image of which registry."""

    host: str
    repository: str
    wanted: str  # a tag or a digest


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of a registry."""

    user: str
    password: str


def parse_reference(text: str) -> Reference:
    """`host[:port]/repository[:tag][@digest]`. The host is always named: there is no default."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text!r} is no image reference", hint="write host[:port]/repository[:tag][@sha256:…]"
        )
    return Reference(
        match["host"], match["repository"], match["digest"] or match["tag"] or "latest"
    )


def read_credentials(host: str, config: Path) -> Credentials | None:
    """What `docker login` keeps in its config.json for a host; None when there is nothing."""
    try:
        auths = parse_json(config.read_bytes()).get("auths", {})
        encoded = auths.get(host, {}).get("auth")
        if not encoded:
            return None
        user, _, password = base64.b64decode(encoded).decode().partition(":")
    except (OSError, ValueError, AttributeError):
        return None
    return Credentials(user, password)


class Registry:
    """One repository, asked at its mirrors first.

    Args:
        mirrors: hosts that have the same repositories.
        plain_http: no TLS; loopback addresses never use it.
        scratch: a folder for blobs on their way.
    """

    def __init__(
        self,
        reference: Reference,
        scratch: Path,
        *,
        credentials: Credentials | None = None,
        mirrors: Sequence[str] = (),
        plain_http: bool = False,
        retries: RetryPolicy | None = None,
    ) -> None:
        self._reference = reference
        self._scratch = scratch
        self._credentials = credentials
        self._hosts = (*mirrors, reference.host)
        self._plain_http = plain_http
        self._retries = retries or RetryPolicy()
        self._authorization: dict[str, str] = {}

    def manifest(self) -> dict[str, Any]:
        """The image's manifest for this machine. Raises `BadArchiveError`, `SourceError`."""
        wanted = self._reference.wanted
        raw = self._document(wanted)
        if wanted.startswith("sha256:"):
            check_digest(raw, wanted)
        document = parse_document(raw)
        if is_index(document):
            digest = str(choose(document).get("digest"))
            raw = self._document(digest)
            check_digest(raw, digest)
            document = parse_document(raw)
        return document

    @contextmanager
    def open_blob(self, descriptor: Mapping[str, Any]) -> Iterator[BinaryIO]:
        digest, size = str(descriptor.get("digest")), descriptor.get("size", -1)
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest) or type(size) is not int or size < 0:
            raise BadArchiveError(f"the descriptor of {digest!r} is none")
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            self._download(digest, size, file)
            file.seek(0)
            if HashedStream(file).drain() != digest:
                raise BadArchiveError("a blob has another digest than it is called", where=digest)
            file.seek(0)
            yield file

    def _document(self, wanted: str) -> bytes:
        headers = {"Accept": ", ".join(ACCEPTED)}
        found: list[bytes] = []

        def read(response: http.client.HTTPResponse) -> None:
            raw = response.read(DOCUMENT_LIMIT_BYTES + 1)
            if len(raw) > DOCUMENT_LIMIT_BYTES:
                raise BadArchiveError("a manifest that is too large")
            found.append(raw)

        self._from_hosts(f"manifests/{wanted}", headers, read)
        return found[-1]

    def _download(self, digest: str, size: int, file: BinaryIO) -> None:
        def read(response: http.client.HTTPResponse) -> None:
            if response.status == 200:
                file.seek(0)
                file.truncate()
            while file.tell() < size and (piece := response.read1(_PIECE_BYTES)):
                file.write(piece)
            if file.tell() != size:
                raise UnavailableError(f"the blob ended after {file.tell()} bytes", where=digest)

        def ask() -> dict[str, str]:
            return {"Range": f"bytes={file.tell()}-"} if file.tell() else {}

        self._from_hosts(f"blobs/{digest}", ask, read)

    def _from_hosts(self, path: str, headers: Any, read: Any) -> None:
        """Asks the mirrors, then the registry itself."""
        faults = []
        for host in self._hosts:

            def ask(host: str = host) -> None:
                wanted = headers() if callable(headers) else headers
                with self._request(host, path, wanted) as response:
                    read(response)

            try:
                self._retries.run(ask, time.monotonic() + _WHOLE_S)
            except UnavailableError as error:
                faults.append(f"{host}: {error.what}")
                continue
            return
        raise SourceError("; ".join(faults), where=f"{self._reference.repository} {path}")

    @contextmanager
    def _request(
        self, host: str, path: str, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        scheme = "http" if self._plain_http or _is_loopback(host) else "https"
        url = f"{scheme}://{host}/v2/{self._reference.repository}/{path}"
        own = self._authorization.get(host)
        sent = {**headers, **({"Authorization": own} if own else {})}
        with self._answer(url, sent) as response:
            if response.status != 401:
                _check(response)
                yield response
                return
            challenge = response.headers.get("WWW-Authenticate", "")
        if own is not None:
            self._authorization.pop(host)
        self._authorization[host] = self._authorize(challenge)
        sent = {**headers, "Authorization": self._authorization[host]}
        with self._answer(url, sent) as response:
            _check(response)
            yield response

    def _authorize(self, challenge: str) -> str:
        kind, _, rest = challenge.partition(" ")
        basic = None
        if self._credentials is not None:
            pair = f"{self._credentials.user}:{self._credentials.password}"
            basic = "Basic " + base64.b64encode(pair.encode()).decode()
        if kind.lower() == "basic" and basic is not None:
            return basic
        if kind.lower() != "bearer":
            raise RefusedError("the registry wants a login", hint="docker login, or --user")
        fields = dict(_CHALLENGE.findall(rest))
        query = {key: fields[key] for key in ("service", "scope") if key in fields}
        query.setdefault("scope", f"repository:{self._reference.repository}:pull")
        realm = fields.get("realm", "")
        if basic and not (self._plain_http or _is_private(realm)):
            raise RefusedError(f"the registry sends the login to {realm[:200]!r}, in the clear")
        url = f"{realm}?{urllib.parse.urlencode(query)}"
        with self._answer(url, {"Authorization": basic} if basic else {}) as response:
            _check(response)
            document = parse_document(response.read(DOCUMENT_LIMIT_BYTES))
        token = document.get("token") or document.get("access_token")
        if not isinstance(token, str):
            raise RefusedError("the token server gave no token")
        return f"Bearer {token}"

    @contextmanager
    def _answer(self, url: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Follows redirects; an Authorization goes to no other host, nor on in the clear."""
        with contextlib.ExitStack() as stack:
            for _ in range(_REDIRECTS + 1):
                try:
                    parts = urllib.parse.urlsplit(url)
                    connection = stack.enter_context(contextlib.closing(_connect(parts)))
                    target = urllib.parse.urlunsplit(("", "", parts.path, parts.query, ""))
                    connection.request("GET", target, headers=dict(headers))
                    response = stack.enter_context(contextlib.closing(connection.getresponse()))
                except (OSError, http.client.HTTPException) as error:
                    raise UnavailableError(f"{type(error).__name__}: {error}"[:200]) from error
                except ValueError as error:
                    raise _no_address(url) from error
                if response.status not in (301, 302, 303, 307, 308):
                    break
                location = response.headers.get("Location", "")
                try:
                    following = urllib.parse.urljoin(url, location)
                    is_elsewhere = _is_elsewhere(parts, urllib.parse.urlsplit(following))
                except ValueError as error:
                    raise _no_address(location) from error
                if is_elsewhere:
                    headers = {k: v for k, v in headers.items() if k != "Authorization"}
                url = following
            else:
                raise RefusedError("too many redirects")
            try:
                yield response
            except (OSError, http.client.HTTPException) as error:
                raise UnavailableError(f"{type(error).__name__}: {error}"[:200]) from error


def _is_elsewhere(here: urllib.parse.SplitResult, there: urllib.parse.SplitResult) -> bool:
    return here.netloc != there.netloc or (here.scheme == "https" and there.scheme != "https")


def _no_address(url: str) -> RefusedError:
    """Of a place that a server sends us to."""
    return RefusedError(f"{url[:200]!r} is not an http address")


def _connect(parts: urllib.parse.SplitResult) -> http.client.HTTPConnection:
    connection: http.client.HTTPConnection
    if parts.scheme == "https" and parts.hostname:
        tls = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=_TIMEOUT_S, context=tls
        )
    elif parts.scheme == "http" and parts.hostname:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    else:
        raise RefusedError(f"{parts.geturl()!r} is not an http address")
    connection.response_class = functools.partial(  # type: ignore[assignment]
        TimedResponse, deadline_s=time.monotonic() + _ANSWER_S, stall_s=_TIMEOUT_S
    )
    return connection


def _check(response: http.client.HTTPResponse) -> None:
    if response.status in (200, 206):
        return
    said = response.read(300).decode("utf-8", "replace").strip()
    text = f"answered {response.status} {said}".strip()
    if response.status in (429, 500, 502, 503, 504):
        raise UnavailableError(text, retry_after_s=seconds_of(response.headers.get("Retry-After")))
    raise RefusedError(text)


def _is_private(url: str) -> bool:
    """What is sent there nobody else can read."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise _no_address(url) from error
    return parts.scheme == "https" or _is_loopback(parts.netloc)


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
