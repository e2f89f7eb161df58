"""A WSGI app for gunicorn: what it wrote, and what it keeps in memory, since its first worker."""

import os
import secrets
from pathlib import Path

NOTE = Path("/var/lib/nagara-test-note")
kept = secrets.token_hex(8)  # with --preload the same in all workers
NOTE.write_text(kept)


def app(environ, start_response):
    path = environ["PATH_INFO"]
    if path == "/":
        body = b"ready"
    elif path == "/kept":
        body = kept.encode()
    elif path == "/file":
        body = NOTE.read_bytes()
    elif path == "/worker":
        body = str(os.getpid()).encode()
    else:
        start_response("404 Not Found", [("content-length", "0")])
        return [b""]
    start_response("200 OK", [("content-length", str(len(body)))])
    return [body]
