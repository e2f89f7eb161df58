"""A small HTTP server that runs inside replicas and does what a test tells it.

GET answers `/canary` with the content of `canary`, anything else with `ready`. POST executes the
body as Python in a namespace that is kept between requests and answers with `answer` as JSON. PUT
adds to the list `asked` what came, and whether it had the replica's token; `/deny` is refused.
Settings come from the environment: see below.
"""

import http.server
import json
import os
import sys
import threading
import time

kept = {"canary": os.environ.get("CANARY", "the canary sings"), "os": os, "threading": threading}
if os.environ.get("HOOKS"):
    from nagara.snapshot import hooks

    kept["hooks"] = hooks
    hooks.listen()
time.sleep(float(os.environ.get("WAIT_S", "0")))
if text := os.environ.get("FIRST"):
    exec(text, kept)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        answer = kept["canary"] if self.path == "/canary" else "ready"
        self._answer(200, (answer() if callable(answer) else answer).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        kept["answer"] = None
        try:
            exec(json.loads(body), kept)
            self._answer(200, json.dumps(kept["answer"]).encode())
        except Exception as error:  # noqa: BLE001 - told to the test
            self._answer(500, f"{type(error).__name__}: {error}".encode())

    def do_PUT(self):
        with os.fdopen(os.open("/run/nagara/token", os.O_RDONLY)) as file:
            has_token = self.headers["authorization"] == f"Bearer {file.read()}"
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        kept.setdefault("asked", []).append([self.path, body, has_token])
        self._answer(403 if self.path == "/deny" else 200, b"")

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


print("serving", file=sys.stderr, flush=True)
server = kept["server"] = Server(("127.0.0.1", int(os.environ["LISTEN"])), Handler)
threading.Thread(target=server.serve_forever).start()
