"""A zone's cache: one machine's object folder, served to its neighbours over HTTP.

    GET, HEAD  /TENANT/sha256/NAME      an object or a range of it; fetched from behind if need be
    GET        /TENANT/chunks/NAME      the chunk list of a large object
    GET        /TENANT/roots/KIND/NAME
    PUT        the same, with a token that may write; content is verified against its name
    DELETE     /TENANT/roots/KIND/NAME
    GET        /healthz, /stats

Objects are verified before they are served, sent with sendfile, and evicted under the folder's
bound. Errors: 404 nobody has it, 503 somebody may have it (ask again), 507 no room.
"""

import json
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus

from nagara.base.errors import NagaraError
from nagara.store.chunked import find_chunk_list
from nagara.store.errors import (
    AbsentError,
    BadNameError,
    CorruptError,
    FullError,
    StoreError,
    UnavailableError,
)
from nagara.store.http_server import BadRequestError, HttpServer, Request
from nagara.store.local import ObjectFolder, check_tenant
from nagara.store.names import ObjectName, list_bytes, parse_chunk_list, parse_name
from nagara.store.reader import FileReader, Reader
from nagara.store.roots import (
    DOCUMENT_LIMIT_BYTES,
    fetch_root,
    parse_root,
    read_list,
    remove_root,
    root_key,
    write_root,
)
from nagara.store.store import Store
from nagara.store.tokens import Tokens

_log = logging.getLogger(__name__)
_COPY_BYTES = 1 << 20
_STATUS = (
    (AbsentError, HTTPStatus.NOT_FOUND),
    (BadNameError, HTTPStatus.BAD_REQUEST),
    (CorruptError, HTTPStatus.BAD_GATEWAY),
    (FullError, HTTPStatus.INSUFFICIENT_STORAGE),
    (UnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
)


class CacheServer:
    """The server of one folder.

    Args:
        open_store: makes a tenant's store over the folder, with the tiers behind this one.
        tls: None: without encryption.
    """

    def __init__(
        self,
        folder: ObjectFolder,
        open_store: Callable[[str], Store],
        tokens: Tokens,
        address: tuple[str, int],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._folder = folder
        self._open_store = open_store
        self._tokens = tokens
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()
        self._server = HttpServer(address, self.handle, tls=tls)

    @property
    def port(self) -> int:
        return self._server.port

    def run(self) -> None:
        """Serves in this thread until `close`."""
        self._server.run()

    def close(self) -> None:
        """Ends `run` and the stores; the folder belongs to the caller."""
        self._server.close()
        for store in self._stores.values():
            store.close()

    def handle(self, request: Request) -> None:
        """Answers one request; called from its connection's thread."""
        if request.path == "/healthz":
            request.answer(HTTPStatus.OK, b"ok\n")
            return
        if request.path == "/stats":
            self._answer_stats(request)
            return
        tenant, _, key = request.path.removeprefix("/").partition("/")
        is_writing = request.method in ("PUT", "DELETE")
        if not self._tokens.may(request.token, tenant, write=is_writing):
            known = self._tokens.knows(request.token)
            status = HTTPStatus.FORBIDDEN if known else HTTPStatus.UNAUTHORIZED
            request.answer(status, b"", {} if known else {"WWW-Authenticate": "Bearer"})
            return
        try:
            check_tenant(tenant)
            self._dispatch(request, self._store(tenant), key)
        except NagaraError as error:
            if request.is_answered:  # the body cannot be finished: cut it, so the client knows
                raise ConnectionAbortedError(str(error)) from error
            self._answer_error(request, error)

    def _dispatch(self, request: Request, store: Store, key: str) -> None:
        part, _, rest = key.partition("/")
        if part == "sha256":
            name = parse_name(rest)
            if request.method == "PUT":
                _put_object(request, store, name)
            elif request.method == "DELETE":
                raise BadRequestError(HTTPStatus.METHOD_NOT_ALLOWED, "objects end by collection")
            else:
                _send_object(request, store, name)
        elif part == "chunks":
            _handle_list(request, store, parse_name(rest))
        elif part == "roots" and rest.count("/") == 1:
            _handle_root(request, store, *rest.split("/"))
        else:
            raise BadRequestError(HTTPStatus.NOT_FOUND, "no such place")

    def _store(self, tenant: str) -> Store:
        with self._lock:
            if tenant not in self._stores:
                self._stores[tenant] = self._open_store(tenant)
            return self._stores[tenant]

    def _answer_stats(self, request: Request) -> None:
        if not self._tokens.knows(request.token):
            request.answer(HTTPStatus.UNAUTHORIZED, b"", {"WWW-Authenticate": "Bearer"})
            return
        with self._lock:
            tenants = {
                tenant: [asdict(report) for report in store.reports()]
                for tenant, store in self._stores.items()
            }
        document = {"total_bytes": self._folder.ledger.total_bytes(), "tenants": tenants}
        body = json.dumps(document).encode()
        request.answer(HTTPStatus.OK, body, {"Content-Type": "application/json"})

    def _answer_error(self, request: Request, error: NagaraError) -> None:
        status = HTTPStatus.BAD_REQUEST
        if isinstance(error, StoreError):
            status = next(
                (code for kind, code in _STATUS if isinstance(error, kind)),
                HTTPStatus.INTERNAL_SERVER_ERROR,
            )
        headers = {"Retry-After": "1"} if status is HTTPStatus.SERVICE_UNAVAILABLE else {}
        request.answer(status, f"{error.what}\n".encode(), headers)


def _send_object(request: Request, store: Store, name: ObjectName) -> None:
    if request.method == "HEAD":
        if not store.local.has(name):
            raise AbsentError("not kept here", where=str(name))
        request.begin(HTTPStatus.OK, name.size, {"Accept-Ranges": "bytes"})
        return
    part = request.range_of(name.size)
    start, length = (part.start, part.length) if part else (0, name.size)
    reader = store.open(name)
    try:
        if length and not isinstance(reader, FileReader):
            # Before the head: an object that cannot be had shall be answered by a status.
            reader.read_into(memoryview(bytearray(1)), start, store.deadline(None))
        headers = {"Accept-Ranges": "bytes"}
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{name.size}"
        request.begin(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK, length, headers)
        if isinstance(reader, FileReader):
            request.send_file(reader.descriptor, start, length)
        else:
            _send_read(request, reader, start, length, store)
    finally:
        reader.close()


def _send_read(request: Request, reader: Reader, start: int, length: int, store: Store) -> None:
    buffer = memoryview(bytearray(min(length, _COPY_BYTES)))
    while length:
        piece = buffer[: min(length, len(buffer))]
        reader.read_into(piece, start, time.monotonic() + store.time_limit_s)
        request.send(piece)
        start, length = start + len(piece), length - len(piece)


def _put_object(request: Request, store: Store, name: ObjectName) -> None:
    if request.body_bytes != name.size:
        raise BadRequestError(HTTPStatus.BAD_REQUEST, "the length is not that of the name")
    if store.local.has(name):
        while request.read_body(_COPY_BYTES):
            pass
        request.answer(HTTPStatus.NO_CONTENT)
        return
    store.local.folder.make_room(name.size)
    with store.local.temporary() as path:
        with path.open("wb") as file:
            while data := request.read_body(_COPY_BYTES):
                # Zeros become holes: sparse objects are sparse here too.
                if data.count(0) == len(data):
                    file.seek(len(data), 1)
                else:
                    file.write(data)
            file.truncate(name.size)
        hashed = store.named(path)
        if hashed.name != name:
            raise BadNameError("the content does not have this name", where=str(name))
        store.add_hashed(path, *hashed)
    request.answer(HTTPStatus.CREATED)


def _handle_list(request: Request, store: Store, name: ObjectName) -> None:
    if not name.is_chunked:
        raise AbsentError("a small object has no chunk list", where=str(name))
    if request.method == "PUT":
        # Only looked at: the list is made again from the content, which follows.
        if request.body_bytes != list_bytes(name):
            raise BadRequestError(HTTPStatus.BAD_REQUEST, "the length is not that of the list")
        parse_chunk_list(_whole_body(request), name)
        request.answer(HTTPStatus.NO_CONTENT)
        return
    raw = find_chunk_list(store.local, store.transfer, name, store.deadline(None)).to_bytes()
    part = request.range_of(len(raw))
    if part is None:
        request.answer(HTTPStatus.OK, raw)
        return
    said = f"bytes {part.start}-{part.start + part.length - 1}/{part.size}"
    body = raw[part.start : part.start + part.length]
    request.answer(HTTPStatus.PARTIAL_CONTENT, body, {"Content-Range": said})


def _handle_root(request: Request, store: Store, kind: str, name: str) -> None:
    root_key(kind, name)
    if request.method == "DELETE":
        remove_root(store.local, kind, name)
        request.answer(HTTPStatus.NO_CONTENT)
    elif request.method == "PUT":
        if request.body_bytes > DOCUMENT_LIMIT_BYTES:
            raise BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too large for a root")
        root = parse_root(kind, name, _whole_body(request))
        for list_name in root.lists:
            read_list(store, list_name)
        write_root(store.local, root)
        request.answer(HTTPStatus.CREATED)
    else:
        body = fetch_root(store, kind, name).to_bytes()
        request.answer(HTTPStatus.OK, body, {"Content-Type": "application/json"})


def _whole_body(request: Request) -> bytes:
    body = bytearray()
    while data := request.read_body(_COPY_BYTES):
        body += data
    return bytes(body)
