"""The servers as app files, with what is asked of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nagara.cli.example_app import engine_app, vllm_app

from .conftest import APPS

MODEL = "smollm2"
_GREEDY = {
    "model": MODEL,
    "prompt": "The capital of France is",
    "max_tokens": 8,
    "temperature": 0,
}
_INFER, _PYTHON = '{canary = {path = "/infer"}}', '{preset = "python"}'


@dataclass(frozen=True, slots=True)
class Question:
    """A request; `body` makes it a POST. Answers of an OpenAI server are compared by text.

    `is_of_start`: made by random at each plain start, so the same in clones only.
    """

    path: str
    body: dict[str, object] | None = None
    is_of_start: bool = False

    def essence(self, answer: bytes) -> object:
        """What of the answer must be equal."""
        return [c["text"] for c in json.loads(answer)["choices"]] if self.body else answer


@dataclass(frozen=True, slots=True)
class RealServer:
    """A server: its environment, how its app file is made of that folder, what it is asked."""

    name: str
    environment: str | None
    app: Callable[[Path], str]
    questions: tuple[Question, ...]
    capture_s: float = 300.0

    def __str__(self) -> str:
        return self.name


def _app(name: str, command: list[str], ready: str, **keys: object) -> str:
    lines = [f"[app.{name}]", 'image = "host"', f"command = {json.dumps(command)}"]
    lines += [f"{key} = {value}" for key, value in keys.items()]
    lines += [f'ready = "{ready}"', "scale = {max = 2, concurrency = 1}"]
    return "\n".join([*lines, 'timeouts = {start = "15m"}', ""])


def _with_source(script: str, source: Path, *arguments: str) -> list[str]:
    """A shell that has the text of `source` as `$0`: replicas do not see the tests' folder."""
    return ["/bin/sh", "-ec", script, source.read_text(), "${PORT}", *arguments]


def torch_command(folder: Path) -> list[str]:
    """uvicorn with FastAPI and torch; the hooks are one file beside the server's own."""
    from nagara.snapshot import hooks

    script = 'mkdir -p /srv/app && cd /srv/app && printf %s "$0" >api.py && '
    script += 'printf %s "$3" >nagara_hooks.py && exec "$2" -m uvicorn api:app '
    script += '--host 127.0.0.1 --port "$1" --log-level warning'
    python = str(folder / "bin/python")
    text = Path(hooks.__file__).read_text()
    return _with_source(script, APPS / "torch_api.py", python, text)


def workers_command(folder: Path) -> list[str]:
    """gunicorn with three workers, each of which loads the app by itself."""
    script = 'mkdir -p /srv/app && cd /srv/app && printf %s "$0" >workers.py && '
    script += 'exec "$2" -m gunicorn --workers 3 --bind "127.0.0.1:$1" --log-level warning '
    script += "workers:app"
    return _with_source(script, APPS / "workers.py", str(folder / "bin/python"))


def _holding(_: Path) -> str:
    script = 'printf %s "$0" >/srv/holding.py && exec python3 /srv/holding.py "$1"'
    command = _with_source(script, APPS / "holding.py")
    return _app("holding", command, "/", snapshot='{canary = {path = "/"}}')


def _caddy(folder: Path) -> str:
    program = str(folder / "usr/bin/caddy")
    script = "mkdir -p /srv/www && tr -dc a-f </dev/urandom | head -c 16 >/srv/www/file && "
    script += 'exec "$0" file-server --listen "127.0.0.1:$1" --root /srv/www'
    return _app("caddy", ["/bin/sh", "-ec", script, program, "${PORT}"], "/file")


def _llama(folder: Path) -> str:
    command = [str(folder / "bin/python"), "-m", "llama_cpp.server"]
    command += ["--model", str(folder / "model.gguf"), "--model_alias", MODEL, "--n_ctx", "512"]
    command += ["--host", "127.0.0.1", "--port", "${PORT}"]
    body = json.dumps(_GREEDY).replace('": ', '" = ')
    snapshot = f'{{preset = "python", canary = {{path = "/v1/completions", body = {body}}}}}'
    return _app("llama", command, "/v1/models", snapshot=snapshot)


def _llama_node(folder: Path) -> str:
    script = 'mkdir -p /srv/app && printf %s "$0" >/srv/app/llama.mjs && '
    script += 'exec node /srv/app/llama.mjs "$2" "$1"'
    command = _with_source(script, APPS / "llama.mjs", str(folder))
    body = json.dumps(_GREEDY).replace('": ', '" = ')
    snapshot = f'{{canary = {{path = "/v1/completions", body = {body}}}}}'
    return _app("llama-node", command, "/", snapshot=snapshot)


SERVERS = (
    RealServer(
        "engine",
        None,
        lambda _: engine_app("engine", MODEL),
        (Question("/v1/completions", _GREEDY),),
    ),
    RealServer(
        "torch",
        "web",
        lambda folder: _app("torch", torch_command(folder), "/", snapshot=_INFER),
        (Question("/kept", is_of_start=True), Question("/infer")),
    ),
    RealServer(
        "gunicorn",
        "web",
        lambda folder: _app("gunicorn", workers_command(folder), "/", snapshot=_PYTHON),
        (Question("/"),),
    ),
    RealServer(
        "vllm",
        "vllm",
        lambda folder: vllm_app("vllm", MODEL, folder / "bin/python", eager=True),
        (Question("/v1/completions", _GREEDY),),
        capture_s=1500.0,
    ),
    RealServer("llama", "llama", _llama, (Question("/v1/completions", _GREEDY),)),
    RealServer("llama-node", "llama-node", _llama_node, (Question("/v1/completions", _GREEDY),)),
    RealServer("caddy", "caddy", _caddy, (Question("/file", is_of_start=True),)),
    RealServer("holding", None, _holding, (Question("/rows"), Question("/other"))),
)  # fmt: skip
