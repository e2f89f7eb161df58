"""The page for people: static files of this package, at `/` and below `/-/`.

No app can be there: an app's name begins with a letter or a digit. The files are read once. What
they may do is limited by their headers: no scripts, styles or connections but our own, no frame
around them, and no text that becomes markup.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from nagara.control.refusal import Refusal, not_found

_FOLDER = Path(__file__).parent / "page_files"
_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
}  # fmt: skip
_PREFIX = "/-/"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# For pages of apps, which share an address with ours unless they are called by host name: they
# may run, but as strangers who cannot see what a signed-in person does here.
APART = "sandbox allow-scripts allow-forms allow-popups allow-downloads allow-modals"


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    tag: str


class WebPage:
    """The page's files."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._files = {path.name: _read(path) for path in folder.iterdir() if path.is_file()}

    def serves(self, raw_path: str) -> bool:
        """Whether the path is the page's."""
        path = raw_path.partition("?")[0]
        return path == "/" or path.startswith(_PREFIX)

    def handle(self, request: web.BaseRequest) -> web.Response:
        """Answers a request for which `serves` holds; needs no key, tells nothing."""
        path = request.raw_path.partition("?")[0]
        file = self._files.get("index.html" if path == "/" else path.removeprefix(_PREFIX))
        if file is None:
            return not_found(f"the page has no file {path!r}").response()
        if request.method not in ("GET", "HEAD"):
            return Refusal(405, "only GET is served here", code="method_not_allowed").response()
        headers = {**HEADERS, "ETag": file.tag}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=file.body, content_type=file.kind, charset="utf-8", headers=headers
        )


def _read(path: Path) -> _File:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(body, _TYPES.get(path.suffix, "text/plain"), tag)
