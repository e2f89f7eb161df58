"""A registry that wants bearer tokens, sends blobs elsewhere and breaks off once. For one test."""

import base64
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
LOG: list[str] = []
BASIC = "Basic " + base64.b64encode(b"user:secret").decode()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        host, port = "127.0.0.1", self.server.server_address[1]
        if self.path == "/log":
            self.send("\n".join(LOG).encode())
        elif self.path.startswith("/token"):
            is_right = self.headers.get("Authorization") == BASIC
            scoped = "scope=repository%3Ateam%2Fapp%3Apull" in self.path
            self.send(b'{"token": "good"}' if is_right and scoped else b"{}")
        elif self.path.startswith("/elsewhere/"):
            # Another host as far as a client can tell.
            if self.headers.get("Authorization"):
                LOG.append("leaked")
            self.send_blob((FOLDER / self.path.removeprefix("/elsewhere/")).read_bytes())
        elif self.headers.get("Authorization") != "Bearer good":
            self.send_response(401)
            realm = f'Bearer realm="http://{host}:{port}/token",service="s",'
            self.send_header("WWW-Authenticate", realm + 'scope="repository:team/app:pull"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif "/manifests/" in self.path:
            self.send((FOLDER / (FOLDER / "manifest").read_text()).read_bytes())
        else:
            name = self.path.rpartition("/")[2].replace(":", "-")
            self.send_response(307)
            self.send_header("Location", f"http://localhost:{port}/elsewhere/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send_blob(self, raw: bytes) -> None:
        wanted = self.headers.get("Range")
        if wanted:
            LOG.append("resumed")
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            self.send(raw[start:], 206)
        elif "broken" not in LOG:
            LOG.append("broken")
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw[: len(raw) // 2])
            self.close_connection = True
        else:
            self.send(raw)

    def send(self, raw: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
