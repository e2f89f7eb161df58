"""An HTTP server small enough to start in an instant, for trying nodes out.

Run as a script with the port as argument; standard library only. It prints "ready" when it
listens, and every request.

    GET /health         "ok"
    GET /exit?code=N    answers, then the process ends with that code
    anything else       404
"""

import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers by the table above."""
        address = urlsplit(self.path)
        sys.stdout.write(f"GET {self.path}\n")
        sys.stdout.flush()
        if address.path == "/health":
            self._answer(200, b"ok")
        elif address.path == "/exit":
            code = int(parse_qs(address.query).get("code", ["0"])[0])
            self._answer(200, b"bye")
            threading.Timer(0.05, os._exit, (code,)).start()
        else:
            self._answer(404, b"not found")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Said on standard output already."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(port: int, delay_s: float) -> None:
    """Serves for ever, after a pause."""
    time.sleep(delay_s)
    with ThreadingHTTPServer(("127.0.0.1", port), _Handler) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
