"""Two processes that add up their numbers through torch.distributed, behind an HTTP server.

GET `/` answers with the sum, which both must take part in; GET `/health` with `ready`.
"""

import http.server
import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from nagara.snapshot import listen
from nagara.snapshot.communicators import rebuilt

IS_SECOND = os.environ.get("PAIR_RANK") == "1"
BUILDS = []


def build():
    BUILDS.append(os.getpid())
    dist.init_process_group(
        "gloo",
        init_method="tcp://127.0.0.1:29555",
        rank=int(IS_SECOND),
        world_size=2,
        timeout=timedelta(seconds=60),
    )


def add_up():
    number = torch.tensor([10 if IS_SECOND else len(BUILDS)])
    dist.all_reduce(number)
    return int(number)


def be_second():
    rebuilt(build)
    listen()
    print("built", flush=True)
    while sys.stdin.buffer.read(1):
        add_up()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/":
            second.stdin.write(b".")
            second.stdin.flush()
            said = str(add_up()).encode()
        else:
            said = b"ready"
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *arguments):
        pass


torch.set_num_threads(1)
if IS_SECOND:
    be_second()
else:
    second = subprocess.Popen(
        [sys.executable, "-c", os.environ["PAIR"]],
        env={**os.environ, "PAIR_RANK": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    rebuilt(build)
    listen()
    assert second.stdout.readline() == b"built\n"
    http.server.ThreadingHTTPServer(("", int(os.environ["LISTEN"])), Handler).serve_forever()
